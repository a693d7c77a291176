"""One clock for all ranks of a machine, and what the measured times say.

Invariant: a time goes from the first rank's start to the last rank's end. All processes of a machine read
the same monotonic clock, so that ranks only note when they start and end, and nobody waits to report.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist

__all__ = ["Clock", "Spans", "Times", "combine", "run_rounds", "speed"]

Spans = dict[str, list[tuple[float, float]]]  # name -> (start, end) per round, of one rank
Times = dict[str, list[float]]  # name -> seconds per round, of all ranks together


class Clock:
    """This rank's spans. Nothing is kept while ``warming``."""

    def __init__(self) -> None:
        self.spans: Spans = defaultdict(list)
        self.warming = False

    def start(self) -> float:
        """Return the time at which all ranks go on together; called by every rank."""
        dist.barrier()
        return time.perf_counter()

    def stop(self, name: str, start: float) -> None:
        """Note a span that ends now."""
        if not self.warming:
            self.spans[name].append((start, time.perf_counter()))


def run_rounds(
    clock: Clock,
    methods: Sequence[Callable[[], None]],
    num_rounds: int,
    *,
    before: Callable[[], None] = lambda: None,
) -> Spans:
    """Run all methods once to warm up, then round by round, each round from another one on.

    Args:
        clock: Has the spans.
        methods: Each notes its own.
        num_rounds: How many are measured.
        before: Called before each method, so that all find the machine in the same state.
    """
    clock.warming = True
    for method in methods:
        before()
        method()
    clock.warming = False
    for number in range(num_rounds):
        first = number % len(methods)
        for method in [*methods[first:], *methods[:first]]:
            before()
            method()
    return dict(clock.spans)


def combine(ranks: Sequence[Spans]) -> Times:
    """Return how long each round took, from the first start to the last end on any rank."""
    times: Times = {}
    for name in ranks[0]:
        rounds = zip(*(spans[name] for spans in ranks), strict=True)
        times[name] = [max(e for _, e in spans) - min(s for s, _ in spans) for spans in rounds]
    return times


def speed(times: Mapping[str, Sequence[float]], ours: str, other: str) -> float:
    """Return how many times as fast as ``other`` the method ``ours`` is, by their medians."""
    return statistics.median(times[other]) / statistics.median(times[ours])
