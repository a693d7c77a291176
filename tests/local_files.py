"""What the tests of local files share."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_ckpt.storage.local import LocalStore
from fsdp_ckpt.storage.local_writer import DIRECT_BYTES
from fsdp_ckpt.storage.shard_io import digest, write_shard
from tests.shards import read_ranges

PAGE = mmap.PAGESIZE
BLOCK = 2 * DIRECT_BYTES
WAYS = (None, True, False)


def image_of(num_bytes: int, seed: int = 0) -> memoryview:
    """Return random bytes that start on a page, as images do."""
    image = memoryview(mmap.mmap(-1, max(num_bytes, 1)))[:num_bytes]
    image[:] = random.Random(seed).randbytes(num_bytes)
    return image


def put(store: LocalStore, key: str, data: memoryview, cuts: tuple[int, ...] = ()) -> None:
    """Write ``data`` in the pieces between ``cuts``, from the last one to the first."""
    writer = store.write(key, len(data))
    for start, stop in reversed(list(zip((0, *cuts), (*cuts, len(data)), strict=True))):
        writer.write_at(start, data[start:stop])
    writer.commit()


def open_files() -> list[str]:
    """Return what this process has open; what has no name is called "#number (deleted)"."""
    paths = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            paths.append(os.readlink(f"/proc/self/fd/{fd}"))
    return paths


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def round_trip(store: LocalStore) -> None:
    """Write and read a shard of several parts."""
    image = image_of(PAGE + 3 * BLOCK + 9)
    data = bytes(image[PAGE:])
    write_shard(
        store.write("a/shard", len(image)),
        image,
        data_offset=PAGE,
        block_bytes=BLOCK,
        seal=lambda digests: ",".join(digests).encode().ljust(PAGE),
        num_threads=store.concurrency,
    )
    buffer = image_of(len(data), 1)
    digests = store.read("a/shard")[:PAGE].decode().strip().split(",")
    assert digests == [digest(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]
    read_ranges(
        store,
        "a/shard",
        [(0, len(data))],
        buffer,
        data_offset=PAGE,
        block_bytes=BLOCK,
        digests=digests,
        explain=lambda start, stop: "",
    )
    assert buffer == data
    store.delete("a/shard")


def needs_direct(folder: Path) -> Path:
    """Return ``folder``, whose file system takes direct I/O."""
    with contextlib.suppress(OSError):
        os.close(os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_DIRECT, 0o600))
        return folder
    pytest.skip("the file system of temporary folders refuses direct I/O")


@contextlib.contextmanager
def mounted(kind: str, folder: Path, *options: str) -> Iterator[Path]:
    """Mount a new file system, where that is permitted."""
    command = ["mount", "-t", kind, *options, kind, str(folder)]
    if (
        os.geteuid() != 0
        or subprocess.run(command, capture_output=True, check=False).returncode != 0
    ):
        pytest.skip(f"mounting {kind} is not permitted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
