"""Time restores beside the limit of the disk and DCP: `python scripts/bench_load.py [--quick] [--json]`.

    raw read      read the checkpoint's bytes into touched memory by direct I/O, an equal share per rank
    restore       CheckpointManager.restore(): verified, and in the live tensors of every rank
    dcp load      dcp.load with FileSystemReader of what dcp.save wrote; not verified

Four ranks save, then four, two and three restore; all from a cold page cache, in one run, round by round, on
all ranks at once; the slowest rank counts. docs/benchmarks.md says what each figure means.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bench_parts.clock import Clock, Spans, Times, combine, run_rounds, speed
from bench_parts.dcp import DcpSaves
from bench_parts.limits import PlainBuffer, align, compact_memory, drop_cached, share_of
from bench_parts.report import Goal, report
from bench_parts.training import Training
from torch.distributed.checkpoint import FileSystemReader

from fsdp_ckpt import CheckpointManager, SaveOptions
from fsdp_ckpt.testing import over_tcp, run_ranks

NUM_SAVED, NUM_LOADED = 4, (4, 2, 3)
GOALS = {"same_over_raw": Goal(0.85), "reshard_over_raw": Goal(0.75)}


class LoadBench:
    """This rank's part; every method is called by every rank.

    Args:
        root: A folder; the four ranks that come first save into it.
        state_bytes: Over all ranks.
    """

    def __init__(self, root: Path, state_bytes: int) -> None:
        self.clock = Clock()
        self._root = root
        self._label = f"{NUM_SAVED} -> {dist.get_world_size()}"
        self._training = Training(state_bytes)
        tensors = self._training.local_tensors()
        self.num_bytes = sum(tensor.nbytes for tensor in tensors)
        self._probe = tensors[0].view(-1)[:1]
        self._manager = CheckpointManager(
            str(root / "ours"), self._training.state, options=SaveOptions(mode="sync")
        )
        if dist.get_world_size() == NUM_SAVED:
            self._manager.save()
            DcpSaves(self._training.state_dict()).save(root / "dcp")
            dist.barrier()  # the files of all ranks are there
        files = sorted((root / "ours").glob("*/*/*.safetensors"))
        self._parts = share_of(files, dist.get_rank(), dist.get_world_size())
        self._buffer = PlainBuffer(sum(align(stop - start) for _, start, stop in self._parts))

    def close(self) -> None:
        """End the manager."""
        self._manager.close()

    def raw_read(self) -> None:
        """Read an equal share of the bytes."""
        self._time("raw read", lambda: self._buffer.read(self._parts))

    def restore(self) -> None:
        """Restore the training state."""
        self._time("restore", self._manager.restore)

    def dcp_load(self) -> None:
        """Load as DCP does, into a state dict of the live tensors."""
        state_dict = self._training.state_dict()
        reader = FileSystemReader(self._root / "dcp")
        self._time("dcp load", lambda: dcp.load(state_dict, storage_reader=reader))

    def _time(self, name: str, read: Callable[[], object]) -> None:
        if dist.get_rank() == 0:
            drop_cached(self._root)
        self._probe.fill_(float("nan"))
        start = self.clock.start()
        read()
        self.clock.stop(f"{self._label} {name}", start)
        if name != "raw read" and self._probe.isnan().item():
            raise AssertionError(f"{name} has not restored the first parameter")


def measure(root: str, state_bytes: int, num_rounds: int) -> tuple[int, Spans]:
    """Run all methods on this rank; return its bytes and its spans."""
    bench = LoadBench(Path(root), state_bytes)
    spans = run_rounds(bench.clock, [bench.raw_read, bench.restore, bench.dcp_load], num_rounds)
    bench.close()
    return bench.num_bytes, spans


def figures(times: Times) -> dict[str, float]:
    """Return the ratios, of several ways to reshard the worst."""
    over_raw, over_dcp = (
        {
            n: speed(times, f"{NUM_SAVED} -> {n} restore", f"{NUM_SAVED} -> {n} {other}")
            for n in NUM_LOADED
        }
        for other in ("raw read", "dcp load")
    )
    others = [n for n in NUM_LOADED if n != NUM_SAVED]
    return {
        "same_over_raw": over_raw[NUM_SAVED],
        "reshard_over_raw": min(over_raw[n] for n in others),
        "same_over_dcp": over_dcp[NUM_SAVED],
        "reshard_over_dcp": min(over_dcp[n] for n in others),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ranks, and print what they measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--gib", type=float, help="state over all ranks (default: 2; quick: 1)")
    parser.add_argument("--rounds", type=int, help="measured rounds (default: 5; quick: 3)")
    parser.add_argument(
        "--quick", action="store_true", help="less state and fewer rounds: under 50 s"
    )
    parser.add_argument("--folder", help="on the disk to measure (default: the temporary folder)")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args(argv)
    state_bytes = int((args.gib or (1 if args.quick else 2)) * 2**30)
    num_rounds = args.rounds or (3 if args.quick else 5)
    times: Times = {}
    with tempfile.TemporaryDirectory(prefix="bench-load-", dir=args.folder) as root:
        for num_ranks in NUM_LOADED:
            compact_memory()
            ranks = run_ranks(
                measure,
                num_ranks,
                root,
                state_bytes,
                num_rounds,
                timeout_s=500 + 30 * num_rounds,
                env=over_tcp(),
            ).values
            times |= combine([spans for _, spans in ranks])
    num_bytes = sum(count for count, _ in ranks)
    print(report(times, dict.fromkeys(times, num_bytes), figures(times), GOALS, as_json=args.json))
    return 0


if __name__ == "__main__":
    sys.exit(main())
