"""What saves take from training, measured beside it: the time it stands still, and steps that are slower.

Invariant: pure arithmetic on durations; one rank's clock, the coordinator's.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from fsdp_ckpt.stability.interval import RECENT_COSTS, measured_cost

__all__ = ["SaveCosts"]

QUIET_STEPS = 32


class SaveCosts:
    """Follows steps and saves."""

    def __init__(self) -> None:
        self._quiet: deque[float] = deque(maxlen=QUIET_STEPS)
        self._costs: deque[float] = deque(maxlen=RECENT_COSTS)
        self._writing: deque[float] = deque(maxlen=RECENT_COSTS)
        self._stall_s: float | None = None  # of the save that is being written
        self._slower_s = 0.0
        self._begun_s = 0.0

    def begin(self, now_s: float, stall_s: float) -> None:
        """Note a save for which training stood still so long, and which is written from now on."""
        if self._stall_s is not None:
            self.end(now_s)
        self._stall_s, self._slower_s, self._begun_s = stall_s, 0.0, now_s

    def step(self, duration_s: float) -> None:
        """Note how long a step took, without the stall of a save before it."""
        if self._stall_s is None:
            self._quiet.append(duration_s)
        elif self._quiet:
            self._slower_s += max(duration_s - median(self._quiet), 0.0)

    def end(self, now_s: float) -> None:
        """Note that the save is durable; none being written is fine."""
        if self._stall_s is not None:
            self._costs.append(self._stall_s + self._slower_s)
            self._writing.append(now_s - self._begun_s)
            self._stall_s = None

    @property
    def cost_s(self) -> float | None:
        """What a save takes from training, in seconds; ``None`` before one was measured."""
        return measured_cost(list(self._costs)) if self._costs else None

    @property
    def persist_s(self) -> float:
        """How long one is written beside training, in seconds."""
        return median(self._writing) if self._writing else 0.0
