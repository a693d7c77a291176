"""Numbers as a reader of a chart wants them: three digits, one unit for a whole axis, round ticks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["BYTES", "COUNT", "RATE", "SECONDS", "Axis", "Scale", "make_axis"]


@dataclass(frozen=True, slots=True)
class Scale:
    """Units of one kind, the largest first, each with its length in the smallest.

    Args:
        units: (length, name).
    """

    units: tuple[tuple[float, str], ...]

    def unit(self, value: float) -> tuple[float, str]:
        """Return the unit in which a value has at least one digit before the point, if there is one."""
        return next((u for u in self.units if abs(value) >= u[0] * 0.9995), self.units[-1])

    def text(self, value: float) -> str:
        """Return ``1.25 s``."""
        length, name = self.unit(value or 1.0)
        return f"{_digits(value / length)} {name}".rstrip()


SECONDS = Scale(
    ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
)
BYTES = Scale(((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")))
RATE = Scale(tuple((length, f"{name}/s") for length, name in BYTES.units))
COUNT = Scale(((1.0, ""),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Ticks of one axis, and where values lie on it.

    Args:
        low: Value at its begin.
        high: Value at its end.
        ticks: (value, text).
        name: Of the unit.
    """

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    name: str

    def place(self, begin: float, end: float) -> Callable[[float], float]:
        """Return value → position, for an axis drawn from ``begin`` to ``end``."""
        factor = (end - begin) / (self.high - self.low)
        return lambda value: begin + (value - self.low) * factor


def make_axis(low: float, high: float, scale: Scale, num_ticks: int) -> Axis:
    """Return an axis that covers values, with at most about ``num_ticks`` round ticks.

    Steps are 1, 2 or 5 times a power of ten of the unit, and for minutes and hours parts of 60 and 24.
    """
    if not high > low:
        high = low + max(abs(low) * 0.1, scale.units[-1][0])
    length, name = scale.unit(max(abs(low), abs(high)))
    if length >= 60 and high / length < 3 and scale is SECONDS:
        length, name = scale.unit(high / 3)  # 90 s rather than 1.5 min: ticks are whole numbers
    step = _step((high - low) / length / max(num_ticks, 1), name)
    if scale is COUNT:
        step = max(step, 1.0)
    first, last = math.ceil(low / length / step - 1e-9), math.floor(high / length / step + 1e-9)
    values = [n * step for n in range(first, last + 1)]
    ticks = tuple((value * length, _digits(value)) for value in values)
    return Axis(low=low, high=high, ticks=ticks, name=name)


def _step(rough: float, name: str) -> float:
    sixties = {
        "min": (1, 2, 5, 10, 15, 30, 60),
        "s": (1, 2, 5, 10, 15, 30, 60),
        "h": (1, 2, 3, 6, 12, 24),
    }
    for step in sixties.get(name, ()) if rough > 0.5 else ():
        if step >= rough:
            return float(step)
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))


def _digits(value: float) -> str:
    """Return a number with up to three digits that count, without an exponent."""
    if value == 0:
        return "0"
    if abs(value) >= 99.95:
        return f"{value:,.0f}".replace(",", "\u202f") if abs(value) >= 9999.5 else f"{value:.0f}"
    decimals = max(2 - math.floor(math.log10(abs(value))), 0)
    text = f"{value:.{min(decimals, 12)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
