"""Time consolidation beside a raw copy and torch's: `python scripts/bench_consolidate.py [--quick] [--json]`.

    raw copy      the checkpoint's files, read and written in 4 MiB pieces, two threads, by direct I/O but for
                  reads of what is cached; fsync
    ours          fsdp_ckpt.hf.consolidate(): verified, durable
    torch, n      consolidate_safetensors_files(num_threads=n) of what dcp.save wrote, then a sync of the disk

Four ranks of FSDP2 save a model; one process makes as many files of it as torch has threads at most: once
with nothing of the source in the page cache (cold), once with all of it (warm, as right after a save), in one
run, round by round. Peak memory is that of the command in a process of its own, over an idle interpreter.
docs/consolidation.md says what each figure means.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bench_parts.clock import Times, speed
from bench_parts.limits import drop_cached
from bench_parts.report import Goal, report
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_ckpt import CheckpointManager, TrainState
from fsdp_ckpt.hf import consolidate
from fsdp_ckpt.testing import over_tcp, run_ranks

NUM_RANKS, NUM_LAYERS, NUM_FILES = 4, 32, 8
TORCH_THREADS = (1, 2, 4, 8)
PIECE_BYTES = 4 * 1024 * 1024
GOALS = {
    "cold_over_raw": Goal(0.8),
    "warm_over_raw": Goal(0.8),
    "warm_over_torch": Goal(2),
    "warm_over_torch_best": Goal(1.1),
    "peak_memory_mb": Goal(300, at_most=True),
}


def save(root: str, model_bytes: int) -> int:
    """Save a model in our format and as torch's sharded safetensors; return its bytes. On every rank."""
    width = max(int((model_bytes / 4 / NUM_LAYERS) ** 0.5) // 16, 1) * 16
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(NUM_LAYERS)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    noise = torch.randn(width * width)
    for parameter in model.parameters():
        local = parameter.to_local().detach()
        local.copy_(noise[: local.numel()].view_as(local))
    with CheckpointManager(f"{root}/ours", TrainState(model=model)) as manager:
        manager.save(mode="sync")
    writer = HuggingFaceStorageWriter(f"{root}/torch", save_distributed=True)
    dcp.save(dict(model.state_dict()), storage_writer=writer)
    return sum(parameter.numel() * 4 for parameter in model.parameters())


class ConsolidateBench:
    """The methods; each makes its output anew in ``root/out``.

    Args:
        root: A folder with what :func:`save` wrote.
        model_bytes: Of all tensors.
    """

    def __init__(self, root: Path, model_bytes: int) -> None:
        self.root = root
        self.out = root / "out"
        self.times: Times = defaultdict(list)
        self.max_shard_bytes = -(-model_bytes // NUM_FILES)
        planned = consolidate(
            root / "ours", self.out, max_shard_bytes=self.max_shard_bytes, dry_run=True
        )
        self._file_of = {
            key: number
            for number, name in enumerate(planned.files, 1)
            for key in planned.keys[name]
        }

    def time(self, name: str, method: Callable[[], object], *, is_warm: bool) -> None:
        """Run a method with its source in the page cache or not, and note how long it took."""
        shutil.rmtree(self.out, ignore_errors=True)
        os.sync()
        drop_cached(self.root)
        if is_warm:
            folder = self.root / ("torch" if name.startswith("torch") else "ours")
            for path in folder.rglob("*.safetensors"):
                _read(path)
        start = time.perf_counter()
        method()
        self.times[f"{'warm' if is_warm else 'cold'} {name}"].append(time.perf_counter() - start)

    def raw_copy(self, *, is_warm: bool) -> None:
        """Copy the checkpoint's files."""
        self.out.mkdir()
        for path in (self.root / "ours").glob("*/*/*.safetensors"):
            _copy(path, self.out / path.name, 0 if is_warm else os.O_DIRECT)

    def ours(self) -> None:
        """Consolidate."""
        consolidate(self.root / "ours", self.out, max_shard_bytes=self.max_shard_bytes)

    def torch(self, num_threads: int) -> None:
        """Consolidate as torch does."""
        self.out.mkdir()
        consolidate_safetensors_files(
            str(self.root / "torch"), str(self.out), self._file_of, num_threads
        )
        os.sync()

    def peak_memory_mb(self) -> float:
        """Return the most memory that the command takes over an idle interpreter, in MB."""
        shutil.rmtree(self.out, ignore_errors=True)
        command = ["-m", "fsdp_ckpt", "consolidate", str(self.root / "ours"), str(self.out)]
        size = ["--max-shard-size", str(self.max_shard_bytes)]
        return (_peak_bytes([*command, *size]) - _peak_bytes(["-c", ""])) / 1e6


def _read(path: Path) -> None:
    """Bring a file into the page cache."""
    with path.open("rb", buffering=0) as file:
        while file.read(PIECE_BYTES):
            pass


def _copy(source: Path, target: Path, read_flags: int) -> None:
    """Copy a file, written by direct I/O; its last piece is written whole and then cut."""
    size = source.stat().st_size
    held = threading.local()
    read_fd = os.open(source, os.O_RDONLY | read_flags)
    write_fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o666)

    def move(at: int) -> None:
        if not hasattr(held, "buffer"):
            held.buffer = mmap.mmap(-1, PIECE_BYTES)
        if os.preadv(read_fd, [held.buffer], at) < min(PIECE_BYTES, size - at):
            raise OSError(f"{source}: short read at byte {at}")
        os.pwrite(write_fd, held.buffer, at)

    try:
        os.posix_fallocate(write_fd, 0, size)
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(move, range(0, size, PIECE_BYTES)))
        os.ftruncate(write_fd, size)
        os.fsync(write_fd)
    finally:
        os.close(read_fd)
        os.close(write_fd)


def _peak_bytes(arguments: list[str]) -> int:
    """Run an interpreter and return its largest resident size."""
    # A child's own figure starts at its parent's size, so a small process in between starts it.
    script = (
        "import os, subprocess, sys\n"
        "process = subprocess.Popen([sys.executable, *sys.argv[1:]], stdout=subprocess.DEVNULL)\n"
        "_, status, usage = os.wait4(process.pid, 0)\n"
        "print(status, usage.ru_maxrss)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True
    )
    status, peak_kib = map(int, done.stdout.split())
    if status:
        raise OSError(f"{arguments}: {done.stderr}")
    return peak_kib * 1024


def figures(times: Times, peak_memory_mb: float) -> dict[str, float]:
    """Return the ratios, and the memory."""
    ratios = {}
    for state in ("cold", "warm"):
        others = [f"{state} torch, {n}" for n in TORCH_THREADS]
        best = min(others, key=lambda name: statistics.median(times[name]))
        ours = f"{state} ours"
        ratios |= {
            f"{state}_over_raw": speed(times, ours, f"{state} raw copy"),
            f"{state}_over_torch": speed(times, ours, others[0]),
            f"{state}_over_torch_best": speed(times, ours, best),
        }
    return {**ratios, "peak_memory_mb": peak_memory_mb}


def measure(bench: ConsolidateBench, num_rounds: int) -> None:
    """Run every method once to warm up, then round by round, each round from another one on."""
    runs: list[tuple[str, Callable[[], object], bool]] = [
        run
        for is_warm in (False, True)
        for run in (
            ("raw copy", partial(bench.raw_copy, is_warm=is_warm), is_warm),
            ("ours", bench.ours, is_warm),
            *((f"torch, {n}", partial(bench.torch, n), is_warm) for n in TORCH_THREADS),
        )
    ]
    for number in range(num_rounds + 1):
        if number == 1:
            bench.times.clear()
        first = number % len(runs)
        for name, method, is_warm in [*runs[first:], *runs[:first]]:
            bench.time(name, method, is_warm=is_warm)


def main(argv: Sequence[str] | None = None) -> int:
    """Save, measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--gib", type=float, help="of the model (default: 4; quick: 0.5)")
    parser.add_argument("--rounds", type=int, help="measured rounds (default: 5; quick: 3)")
    parser.add_argument(
        "--quick", action="store_true", help="a smaller model, fewer rounds: a minute"
    )
    parser.add_argument("--folder", help="on the disk to measure (default: the temporary folder)")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args(argv)
    model_bytes = int((args.gib or (0.5 if args.quick else 4)) * 2**30)
    num_rounds = args.rounds or (3 if args.quick else 5)
    with tempfile.TemporaryDirectory(prefix="bench-consolidate-", dir=args.folder) as folder:
        root = Path(folder)
        timeout_s = 500 + 60 * model_bytes / 2**30
        num_bytes = run_ranks(
            save, NUM_RANKS, folder, model_bytes, timeout_s=timeout_s, env=over_tcp()
        ).values[0]
        bench = ConsolidateBench(root, num_bytes)
        measure(bench, num_rounds)
        ratios = figures(bench.times, bench.peak_memory_mb())
    moved = dict.fromkeys(bench.times, num_bytes)
    print(report(bench.times, moved, ratios, GOALS, as_json=args.json))
    return 0


if __name__ == "__main__":
    sys.exit(main())
