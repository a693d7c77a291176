"""Compare digests for blocks of data: `python scripts/bench_digest.py --json`.

Each candidate digests the same memory in blocks of 4 MiB: in one thread, in two threads at once (no faster
where the binding keeps the GIL), and in the two threads that write the memory to a file with direct I/O, as a
save does. Rounds are interleaved, and medians printed in GiB/s; `write` without a digest is the raw limit.
Candidates that are not installed are named and skipped: `pip install google-crc32c crc32c`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import mmap
import os
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import xxhash

MIB = 1024 * 1024
BLOCK_BYTES, WRITE_BYTES = MIB // 4, 16 * MIB

Digest = Callable[[memoryview], object]


def candidates() -> tuple[dict[str, Digest], list[str]]:
    """Return the digests that can run here, and the names of those that are not installed."""
    found: dict[str, Digest] = {
        "xxh3_64": lambda block: xxhash.xxh3_64(block).hexdigest(),
        "xxh3_64_hexdigest": xxhash.xxh3_64_hexdigest,
        "xxh3_128": lambda block: xxhash.xxh3_128(block).hexdigest(),
        "zlib.crc32": zlib.crc32,
    }
    missing = []
    for name, function in (("google_crc32c", "value"), ("crc32c", "crc32c")):
        try:
            found[f"{name}.{function}"] = getattr(importlib.import_module(name), function)
        except ImportError:
            missing.append(name)
    # Its C code takes bytes only, so that each block is copied first.
    if "google_crc32c.value" in found:
        value = found["google_crc32c.value"]
        found["google_crc32c.value"] = lambda block: value(bytes(block))  # type: ignore[arg-type]
    return found, missing


def digest_all(data: memoryview, digest: Digest, num_threads: int) -> float:
    """Digest every block of ``data``; return GiB/s."""
    blocks = [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]
    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(len, blocks))  # the threads have started
        start = time.perf_counter()
        list(threads.map(digest, blocks))
        return len(data) / 2**30 / (time.perf_counter() - start)


def write_all(data: memoryview, digest: Digest | None, folder: str, flags: int) -> float:
    """Write ``data`` in two threads, durably, each part digested first; return GiB/s."""
    path = os.path.join(folder, "written")
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags, 0o600)

    def put(start: int) -> None:
        stop = min(start + WRITE_BYTES, len(data))
        if digest is not None:
            for at in range(start, stop, BLOCK_BYTES):
                digest(data[at : min(at + BLOCK_BYTES, stop)])
        while start < stop:
            start += os.pwrite(fd, data[start:stop], start)

    try:
        start = time.perf_counter()
        os.posix_fallocate(fd, 0, len(data))
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(put, range(0, len(data), WRITE_BYTES)))
        os.fsync(fd)
        return len(data) / 2**30 / (time.perf_counter() - start)
    finally:
        os.close(fd)
        os.unlink(path)


def direct_flag(folder: str) -> int:
    """Return the flag that opens a file for direct I/O, 0 where the file system refuses it."""
    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_DIRECT, 0o600))
    except OSError:
        return 0
    return os.O_DIRECT


def measure(num_bytes: int, rounds: int, folder: str) -> dict[str, dict[str, float]]:
    """Return candidate → median GiB/s alone, in two threads, and of a write that digests."""
    buffer = mmap.mmap(-1, num_bytes)
    block = os.urandom(BLOCK_BYTES)
    for at in range(0, num_bytes, BLOCK_BYTES):
        buffer[at : at + BLOCK_BYTES] = block
    data, flags = memoryview(buffer), direct_flag(folder)
    found: dict[str, Digest] = candidates()[0]
    rates: dict[str, dict[str, list[float]]] = {}
    for _ in range(rounds):
        plain = write_all(data, None, folder, flags)
        rates.setdefault("none", {}).setdefault("write", []).append(plain)
        for name, digest in found.items():
            row = rates.setdefault(name, {})
            row.setdefault("one thread", []).append(digest_all(data, digest, 1))
            row.setdefault("two threads", []).append(digest_all(data, digest, 2))
            row.setdefault("write", []).append(write_all(data, digest, folder, flags))
    return {
        name: {kind: round(statistics.median(values), 2) for kind, values in row.items()}
        for name, row in rates.items()
    }


def main() -> int:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--mib", type=int, default=512, help="bytes digested, a multiple of 16 MiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=".", help="where to write, on the disk to measure")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        found = measure(args.mib * MIB, args.rounds, folder)
    missing = candidates()[1]
    if args.json:
        print(json.dumps({"gib_per_s": found, "not_installed": missing}))
        return 0
    kinds = ("one thread", "two threads", "write")
    print(f"{'GiB/s':20}" + "".join(f"{kind:>14}" for kind in kinds))
    for name, row in found.items():
        print(f"{name:20}" + "".join(f"{row.get(kind, '-'):>14}" for kind in kinds))
    for name in missing:
        print(f"{name}: not installed, skipped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
