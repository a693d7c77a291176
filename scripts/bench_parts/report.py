"""Times and ratios, for people and for programs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench_parts.clock import Times

__all__ = ["Goal", "report"]


@dataclass(frozen=True, slots=True)
class Goal:
    """What a ratio should reach.

    Args:
        bound: The figure.
        at_most: Whether smaller is better.
    """

    bound: float
    at_most: bool = False

    def describe(self, ratio: float) -> str:
        """Return the goal, and whether the ratio reaches it."""
        reached = ratio <= self.bound if self.at_most else ratio >= self.bound
        sign = "<=" if self.at_most else ">="
        return f"{sign} {self.bound:<6.3g} {'reached' if reached else 'missed'}"


def report(
    times: Times,
    num_bytes: Mapping[str, int],
    ratios: Mapping[str, float],
    goals: Mapping[str, Goal],
    *,
    as_json: bool,
) -> str:
    """Return everything as one JSON object, or as two tables.

    Args:
        times: Seconds per round.
        num_bytes: Bytes that a method moves, by its name; absent where a speed says nothing.
        ratios: The figures asked for; others are shown in the tables too.
        goals: By the ratio's name.
        as_json: Whether a program reads it.
    """
    if as_json:
        spread = {
            name: {
                "median_s": _digits(statistics.median(s)),
                "min_s": _digits(min(s)),
                "max_s": _digits(max(s)),
                "rounds": len(s),
            }
            for name, s in times.items()
        }
        return json.dumps({**{n: _digits(r) for n, r in ratios.items()}, "times": spread})
    lines = [f"{'':34}{'median':>10}{'min':>10}{'max':>10}{'GiB/s':>8}"]
    lines += [_row(name, seconds, num_bytes.get(name)) for name, seconds in times.items()]
    lines.append("")
    for name, ratio in ratios.items():
        goal = goals[name].describe(ratio) if name in goals else ""
        lines.append(f"{name:34}{ratio:10.3f}   {goal}".rstrip())
    return "\n".join(lines)


def _digits(value: float) -> float:
    """Return a figure as far as it says anything; what is not zero stays so, however small."""
    return float(f"{value:.4g}")


def _row(name: str, seconds: Sequence[float], num_bytes: int | None) -> str:
    median = statistics.median(seconds)
    rate = f"{num_bytes / median / 2**30:8.2f}" if num_bytes else ""
    return f"{name:34}{median:8.3f} s{min(seconds):8.3f} s{max(seconds):8.3f} s{rate}"
