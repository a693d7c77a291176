"""Time saves beside the limits of the machine and DCP: `python scripts/bench_save.py [--quick] [--json]`.

    memcpy        copy this rank's part of the state into touched memory
    raw write     write the copied bytes to a new preallocated file by direct I/O, and fsync it
    sync, async,  CheckpointManager.save(): how long it stops training (stall), and when the checkpoint is
    lazy          committed and durable
    dcp sync      dcp.save with FileSystemWriter(sync_files=True)
    dcp async     dcp.async_save with the same writer, in a thread or in a process
    step          forward, backward and a small all-reduce; alone, and beside a save or a raw write

All methods move the same state, in one run, round by round, on all ranks at once; the slowest rank counts.
docs/benchmarks.md says what each figure means.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch.distributed as dist
from bench_parts.clock import Clock, Spans, Times, combine, run_rounds, speed
from bench_parts.dcp import DcpSaves
from bench_parts.limits import PlainBuffer, compact_memory
from bench_parts.report import Goal, report
from bench_parts.training import Training
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from fsdp_ckpt import CheckpointManager, SaveHandle, SaveOptions
from fsdp_ckpt.options import SaveMode, WriterKind
from fsdp_ckpt.testing import over_tcp, run_ranks

NUM_RANKS = 4
# After DCP has freed what it staged: a kernel that gives free memory back to its host does so in bursts, for
# seconds, each of which makes a step half as long again. Per GiB of state.
SETTLE_S = 2.5
# Undisturbed steps before a save in flight; and those between two optimizer steps, as micro-batches are.
NUM_STEPS, NUM_MICRO_STEPS = 8, 16
GOALS = {
    "stall_over_memcpy": Goal(1.3, at_most=True),
    "stall_over_dcp_async": Goal(1 / 3, at_most=True),
    "lazy_stall_over_memcpy": Goal(0.2, at_most=True),
    "durable_over_raw": Goal(0.85),
    "durable_over_dcp_sync": Goal(2),
    "durable_over_dcp_async": Goal(4),
    "step_slowdown": Goal(1.15, at_most=True),
}

Poll = Callable[[], bool]


class SaveBench:
    """This rank's part; every method is called by every rank, and cleans up outside of the timed part.

    Args:
        root: A folder for all that is written.
        state_bytes: Over all ranks.
        writer: Who persists in the background, as in ``SaveOptions``.
    """

    def __init__(self, root: Path, state_bytes: int, writer: WriterKind) -> None:
        self.clock = Clock()
        self.step_s: dict[str, list[float]] = {}
        self._root = root
        self._training = Training(state_bytes)
        self._tensors = self._training.local_tensors()
        self.num_bytes = sum(tensor.nbytes for tensor in self._tensors)
        self._buffer = PlainBuffer(self.num_bytes)
        self._dcp = DcpSaves(self._training.state_dict())
        self._manager = CheckpointManager(
            str(root / "ours"), self._training.state, options=SaveOptions(writer=writer)
        )

    def close(self) -> None:
        """End the manager."""
        self._manager.close()

    def make_step(self) -> None:
        """Make a step: a save comes after one, and neither after a pause nor after another copy."""
        self._training.run_step(is_done=False)

    def memcpy(self) -> None:
        """Copy the live tensors into touched memory."""
        start = self.clock.start()
        self._buffer.copy(self._tensors)
        self.clock.stop("memcpy", start)

    def raw_write(self) -> None:
        """Write the same bytes."""
        with self._scratch("raw") as folder:
            start = self.clock.start()
            self._buffer.write(folder / f"{dist.get_rank()}")
            self.clock.stop("raw write", start)

    def save(self, mode: SaveMode) -> None:
        """Save, and wait until it is durable."""
        with self._scratch("ours"):
            start = self.clock.start()
            handle = self._save(mode)
            if mode != "sync":  # all of it is a stall
                self.clock.stop(f"{mode} stall", start)
            handle.wait()
            self.clock.stop(f"{mode} durable", start)

    def dcp_sync(self) -> None:
        """Save as DCP does."""
        with self._scratch("dcp-sync") as folder:
            start = self.clock.start()
            self._dcp.save(folder)
            self.clock.stop("dcp sync durable", start)

    def dcp_async(self, kind: AsyncCheckpointerType) -> None:
        """Save as DCP does in the background."""
        with self._scratch("dcp-async") as folder:
            start = self.clock.start()
            saving = self._dcp.start(folder, kind)
            self.clock.stop(f"dcp async {kind.value} stall", start)
            saving.result()
            self.clock.stop(f"dcp async {kind.value} durable", start)
        self._settle()

    def save_while_training(self, mode: SaveMode) -> None:
        """Save between training steps; after some of them comes the optimizer's step.

        No parameter has a gradient, so that step() itself does nothing: what it takes is the wait for a lazy
        copy. The copy has as many steps' forward and backward passes as lie between two optimizer steps.
        """
        with self._scratch("ours"):
            self._run_steps(f"step before {mode}", NUM_STEPS)
            start = self.clock.start()
            handle = self._save(mode)
            stall_s = time.perf_counter() - start
            self.clock.stop(f"{mode} call, training", start)
            is_done = self._run_steps(f"step beside {mode}", NUM_MICRO_STEPS, handle.done)
            before = time.perf_counter()
            self._training.optimizer.step()
            stall_s += time.perf_counter() - before
            if not is_done:
                self._run_steps(f"step beside {mode}", None, handle.done)
            handle.wait()
            self.clock.stop(f"{mode} durable, training", start)
            if mode == "lazy" and not self.clock.warming:
                self.clock.spans["lazy stall"].append((start, start + stall_s))

    def raw_write_while_training(self) -> None:
        """Write the same bytes between training steps: what a disk that is busy does to them by itself."""
        with self._scratch("raw") as folder, ThreadPoolExecutor(1) as thread:
            self._run_steps("step before raw write", NUM_STEPS)
            write = thread.submit(self._buffer.write, folder / f"{dist.get_rank()}")
            self._run_steps("step beside raw write", None, write.done)
            write.result()

    def dcp_while_training(self) -> None:
        """Save as DCP does in the background, between training steps."""
        with self._scratch("dcp-async") as folder:
            self._run_steps("step before dcp async", NUM_STEPS)
            start = self.clock.start()
            saving = self._dcp.start(folder, AsyncCheckpointerType.THREAD)
            self._run_steps("step beside dcp async", None, saving.done)
            saving.result()
            self.clock.stop("dcp async durable, training", start)
        self._settle()

    def _settle(self) -> None:
        time.sleep(SETTLE_S * self.num_bytes * NUM_RANKS / 2**30)

    def _save(self, mode: SaveMode) -> SaveHandle:
        self._training.state.progress.advance(samples=1)
        return self._manager.save(mode=mode)

    def _run_steps(self, name: str, num_steps: int | None, poll: Poll = lambda: False) -> bool:
        """Run steps, until ``poll`` says on every rank that it is enough; return whether it did."""
        kept = self.step_s.setdefault(name, []) if not self.clock.warming else []
        is_done = all_done = False  # one step at least, however short the save is
        while not all_done and (num_steps is None or num_steps > 0):
            seconds, all_done = self._training.run_step(is_done=is_done)
            if not all_done:  # the last one tells that there is nothing to run beside any more
                kept.append(seconds)
            is_done = poll()
            num_steps = None if num_steps is None else num_steps - 1
        return all_done

    @contextmanager
    def _scratch(self, name: str) -> Iterator[Path]:
        """Make a folder, and remove it with all that it holds."""
        folder = self._root / name
        if dist.get_rank() == 0:
            folder.mkdir()
        dist.barrier()
        yield folder
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
            os.sync()  # the file system frees the blocks now, not beside the next method
        dist.barrier()


def measure(
    root: str, state_bytes: int, writer: WriterKind, num_rounds: int, quick: bool
) -> tuple[int, Spans, dict[str, list[float]]]:
    """Run all methods on this rank; return its bytes, its spans, and its steps' seconds."""
    bench = SaveBench(Path(root), state_bytes, writer)
    kinds = [AsyncCheckpointerType.THREAD]
    if not quick:
        kinds.append(AsyncCheckpointerType.PROCESS)
    save_beside_steps = partial(bench.save_while_training, "async")
    more = [bench.raw_write_while_training, save_beside_steps]  # few steps fit beside one save
    methods: list[Callable[[], None]] = [
        bench.memcpy,
        bench.raw_write,
        partial(bench.save, "sync"),
        partial(bench.save, "async"),
        save_beside_steps,
        partial(bench.save_while_training, "lazy"),
        *([] if quick else more),
        bench.dcp_sync,
        *(partial(bench.dcp_async, kind) for kind in kinds),
        *([] if quick else [bench.dcp_while_training]),
    ]
    spans = run_rounds(bench.clock, methods, num_rounds, before=bench.make_step)
    bench.close()
    return bench.num_bytes, spans, bench.step_s


def figures(times: Times) -> dict[str, float]:
    """Return the ratios; where several of ours could be meant the worst, of DCP's the best."""
    median = {name: statistics.median(seconds) for name, seconds in times.items()}
    durable = max(("sync durable", "async durable"), key=median.__getitem__)
    dcp = {n: s for n, s in median.items() if n.startswith("dcp async") and "training" not in n}
    dcp_stall = min((n for n in dcp if n.endswith("stall")), key=median.__getitem__)
    dcp_durable = min((n for n in dcp if n.endswith("durable")), key=median.__getitem__)
    slowdowns = {
        name: median[f"step beside {name}"] / median[f"step before {name}"]
        for name in ("async", "lazy", "raw write", "dcp async")
        if f"step beside {name}" in median
    }
    ratios = {
        "stall_over_memcpy": median["async stall"] / median["memcpy"],
        "stall_over_dcp_async": median["async stall"] / median[dcp_stall],
        "lazy_stall_over_memcpy": median["lazy stall"] / median["memcpy"],
        "durable_over_raw": speed(times, durable, "raw write"),
        "durable_over_dcp_sync": speed(times, durable, "dcp sync durable"),
        "durable_over_dcp_async": speed(times, durable, dcp_durable),
        "step_slowdown": slowdowns["async"],
        "sync_durable_over_raw": speed(times, "sync durable", "raw write"),
        "async_durable_over_raw": speed(times, "async durable", "raw write"),
        "lazy_step_slowdown": slowdowns["lazy"],
    }
    for name in ("raw write", "dcp async"):
        if name in slowdowns:
            ratios[f"{name.replace(' ', '_')}_step_slowdown"] = slowdowns[name]
    return ratios


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ranks, and print what they measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--gib", type=float, help="state over all ranks (default: 2; quick: 0.5)")
    parser.add_argument("--rounds", type=int, help="measured rounds (default: 5; quick: 3)")
    parser.add_argument("--quick", action="store_true", help="fewer methods and rounds: under 50 s")
    parser.add_argument("--writer", choices=("process", "thread"), default="process")
    parser.add_argument("--folder", help="on the disk to measure (default: the temporary folder)")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args(argv)
    state_bytes = int((args.gib or (0.5 if args.quick else 2)) * 2**30)
    num_rounds = args.rounds or (3 if args.quick else 5)
    compact_memory()
    with tempfile.TemporaryDirectory(prefix="bench-save-", dir=args.folder) as root:
        ranks = run_ranks(
            measure,
            NUM_RANKS,
            root,
            state_bytes,
            args.writer,
            num_rounds,
            args.quick,
            timeout_s=500 + 60 * num_rounds,
            env=over_tcp(),
        ).values
    times = combine([spans for _, spans, _ in ranks])
    for name in ranks[0][2]:
        times[name] = [seconds for _, _, step_s in ranks for seconds in step_s[name]]
    num_bytes = sum(count for count, _, _ in ranks)
    moved = {n: num_bytes for n in times if n in ("memcpy", "raw write") or "durable" in n}
    print(report(times, moved, figures(times), GOALS, as_json=args.json))
    return 0


if __name__ == "__main__":
    sys.exit(main())
