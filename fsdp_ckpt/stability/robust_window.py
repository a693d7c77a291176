"""What has been usual lately, unmoved by the few values that are not.

Invariant: as long as fewer than half of the values are unusual, median and spread are those of the others.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median

__all__ = ["RobustWindow"]

# The median absolute deviation of normal values is this part of their standard deviation.
MAD_OF_SIGMA = 0.674489750196082


class RobustWindow:
    """The last values of one quantity.

    Args:
        size: Number of values it holds at most.
        values: To begin with, oldest first.
    """

    def __init__(self, size: int, values: Iterable[float] = ()) -> None:
        self._values = deque(values, maxlen=size)

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        """Take in a finite value; the oldest goes once the window is full."""
        self._values.append(value)

    def deviation(self, value: float, floor: float) -> float:
        """Return by how much a value exceeds the median, in standard deviations; 0 without values.

        Args:
            value: Finite.
            floor: The least standard deviation, so that a curve without noise does not make a step of any
                size a spike.

        Source: median and median absolute deviation, scaled to the standard deviation of normal values;
        Hampel, The influence curve and its role in robust estimation, JASA 69, 1974.
        """
        if not self._values:
            return 0.0
        center = median(self._values)
        spread = median(abs(v - center) for v in self._values) / MAD_OF_SIGMA
        width = max(spread, floor)
        if width == 0.0:
            return 0.0 if value <= center else math.inf
        return (value - center) / width

    @property
    def center(self) -> float:
        """The median; NaN without values."""
        return median(self._values) if self._values else math.nan

    def to_json(self) -> list[float]:
        """Return the values, oldest first."""
        return list(self._values)
