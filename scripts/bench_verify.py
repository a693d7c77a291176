"""Time `fsdp-ckpt verify` beside the limit of the disk: `python scripts/bench_verify.py [--quick] [--json]`.

    raw read      read the checkpoint's files into touched memory by direct I/O, in two threads
    verify        all that the command does once it runs: sizes, headers, coverage, every block's digest

One process, from a cold page cache, in one run, round by round. docs/benchmarks.md says what each figure
means.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from bench_parts.clock import Times, speed
from bench_parts.limits import PlainBuffer, align, drop_cached, share_of
from bench_parts.report import Goal, report
from bench_parts.training import Training

from fsdp_ckpt import CheckpointManager, SaveOptions
from fsdp_ckpt.cli import main as run_command
from fsdp_ckpt.testing import over_tcp, run_ranks

NUM_SAVED = 2
GOALS = {"verify_over_raw": Goal(0.8)}


def save(root: str, state_bytes: int) -> None:
    """Save a training state, as one of the ranks."""
    state = Training(state_bytes).state
    with CheckpointManager(root, state, options=SaveOptions(mode="sync")) as manager:
        manager.save()


def measure(root: Path, num_rounds: int) -> tuple[int, Times]:
    """Run both, the other one first each round; return the bytes read and the times."""
    files = sorted(root.glob("*/*/*.safetensors"))
    parts = share_of(files, 0, 1)
    buffer = PlainBuffer(sum(align(stop - start) for _, start, stop in parts))

    def verify() -> None:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            if run_command(["verify", str(root)]) != 0:
                raise AssertionError(said.getvalue())

    methods: list[tuple[str, Callable[[], None]]] = [
        ("raw read", lambda: buffer.read(parts)),
        ("verify", verify),
    ]
    times: Times = defaultdict(list)
    for number in range(num_rounds + 1):  # the first one warms up
        for name, method in methods[:: 1 if number % 2 else -1]:
            drop_cached(root)
            start = time.perf_counter()
            method()
            if number:
                times[name].append(time.perf_counter() - start)
    return sum(path.stat().st_size for path in files), dict(times)


def main(argv: Sequence[str] | None = None) -> int:
    """Save, measure, and print what was measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--gib", type=float, help="checkpoint (default: 2; quick: 1)")
    parser.add_argument("--rounds", type=int, help="measured rounds (default: 5; quick: 3)")
    parser.add_argument("--quick", action="store_true", help="less state and fewer rounds")
    parser.add_argument("--folder", help="on the disk to measure (default: the temporary folder)")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args(argv)
    state_bytes = int((args.gib or (1 if args.quick else 2)) * 2**30)
    num_rounds = args.rounds or (3 if args.quick else 5)
    with tempfile.TemporaryDirectory(prefix="bench-verify-", dir=args.folder) as root:
        run_ranks(save, NUM_SAVED, root, state_bytes, timeout_s=120, env=over_tcp())
        num_bytes, times = measure(Path(root), num_rounds)
    ratios = {"verify_over_raw": speed(times, "verify", "raw read")}
    print(report(times, dict.fromkeys(times, num_bytes), ratios, GOALS, as_json=args.json))
    return 0


if __name__ == "__main__":
    sys.exit(main())
