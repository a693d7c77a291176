"""Lengths of time as people write and read them."""

from __future__ import annotations

import argparse
import math
import re

__all__ = ["duration_text", "parse_duration"]

_SECONDS = {"ms": 1e-3, "": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_SHOWN = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


def parse_duration(text: str) -> float:
    """Turn ``6s``, ``250ms``, ``1.5h``, ``2d`` or ``90`` into seconds, above 0.

    Raises:
        argparse.ArgumentTypeError: It is not one.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip(), re.ASCII)
    unit = None if match is None else _SECONDS.get(match[2])
    seconds = 0.0 if match is None or unit is None else float(match[1]) * unit
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time; write 6s, 250ms, 1.5h or 2d")
    return seconds


def duration_text(seconds: float) -> str:
    """Return ``5.93 min``: three digits, in its largest unit."""
    length, unit = next((s for s in _SHOWN if seconds >= s[0]), (1e-3, "ms"))
    return f"{seconds / length:.3g} {unit}"
