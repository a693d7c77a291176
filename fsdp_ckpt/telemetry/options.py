"""How much telemetry a run leaves beside itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["TelemetryOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryOptions:
    """What is written under ``ROOT/telemetry/``; the same on all ranks.

    Args:
        flush_s: Seconds after which what a rank has told is on storage; failures, rollbacks, the end and, on
            rank 0, commits go at once. A job that dies loses at most so much.
        max_bytes: Of one rank's lines in one start of the job; the oldest go first.
        max_starts: Starts of the job of which lines are kept; the oldest go first.
        progress_s: Seconds between two lines that say at which step the run is, on rank 0.
    """

    flush_s: float = 30.0
    max_bytes: int = 8 * 2**20
    max_starts: int = 100
    progress_s: float = 10.0

    def __post_init__(self) -> None:
        for name, value in (("flush_s", self.flush_s), ("progress_s", self.progress_s)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be above 0, not {value!r}")
        if self.max_bytes < 2**16:
            raise ValueError(f"max_bytes must be at least 65536, not {self.max_bytes!r}")
        if self.max_starts < 1:
            raise ValueError(f"max_starts must be at least 1, not {self.max_starts!r}")
