"""Times and ratios of all peers: two tables for people, one object for programs.

Of each figure the median, and the smallest and largest of all rounds. A ratio is taken round by round, and
says how many times as long as ours it took.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from typing import Any

from bench_parts.clock import Times

__all__ = ["WHAT", "describe", "draw"]

WHAT = ("stall", "saved", "on disk", "load")
NAME_WIDTH, WIDTH = 26, 22


def describe(
    times: Times,
    durable: dict[str, str],
    errors: dict[str, str],
    *,
    ours: tuple[str, str],
    background: Collection[str],
) -> dict[str, dict[str, Any]]:
    """Return what was found, by peer.

    Args:
        times: By ``NAME: WHAT``.
        durable: By peer.
        errors: By peer that does not run; its times are of no worth.
        ours: Our saves that the others are compared with, and the one in the background.
        background: The peers that are compared with the latter.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys([*(key.partition(": ")[0] for key in times), *errors]):
        if name in errors:
            found[name] = {"error": errors[name]}
            continue
        reference = ours[name in background]
        spans = {what: times[f"{name}: {what}"] for what in WHAT if f"{name}: {what}" in times}
        ratios = {}
        for what, seconds in spans.items():
            against = times.get(f"{ours[1] if what == 'stall' else reference}: {what}", [])
            if against:
                ratios[what] = _spread([s / a for s, a in zip(seconds, against, strict=True)])
        found[name] = {
            "durable": durable.get(name, "yes"),
            "times_s": {what: _spread(seconds) for what, seconds in spans.items()},
            "over_ours": ratios,
        }
    return found


def draw(found: dict[str, dict[str, Any]]) -> str:
    """Return the tables."""
    seconds = [_row("seconds", WHAT, "durable")]
    ratios = [_row("times as long as ours", WHAT, "")]
    failed = []
    for name, peer in found.items():
        if "error" in peer:
            failed.append(f"{name}: {peer['error']}")
            continue
        seconds.append(_row(name, _cells(peer["times_s"], "{:.3f}"), peer["durable"]))
        ratios.append(_row(name, _cells(peer["over_ours"], "{:.2f}"), ""))
    blocks = [seconds, ratios, *([["not measured", *failed]] if failed else [])]
    return "\n\n".join("\n".join(block) for block in blocks)


def _spread(values: Sequence[float]) -> dict[str, float]:
    figures = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, 4) for name, value in figures.items()}


def _cells(spreads: dict[str, dict[str, float]], form: str) -> list[str]:
    cells = []
    for what in WHAT:
        if what in spreads:
            median, low, high = (form.format(spreads[what][k]) for k in ("median", "min", "max"))
            cells.append(f"{median} ({low}–{high})")
        else:
            cells.append("–")
    return cells


def _row(name: str, cells: Sequence[str], last: str) -> str:
    return f"{name:{NAME_WIDTH}}{''.join(f'{cell:>{WIDTH}}' for cell in cells)}  {last}".rstrip()
