"""One thing that happened: an event, or a span with its length."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fsdp_ckpt.errors import CorruptCheckpointError

__all__ = ["FORMAT", "URGENT", "VERSION", "Event"]

FORMAT, VERSION = "fsdp_ckpt.telemetry", 1
# After these the job may end at any moment.
URGENT = frozenset(
    {"save.failed", "rollback", "preemption", "spike", "restore.done", "run.raised", "run.ended"}
)
_OWN = ("n", "name", "rank", "wall_s", "monotonic_s", "seconds", "step", "attempt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What a callback gets, and what stands in one line.

    Args:
        name: Such as ``save.copy`` or ``rollback``; ``docs/telemetry.md`` lists them.
        rank: Who tells.
        wall_s: When it began, in seconds since 1970, by this rank's clock.
        monotonic_s: Likewise by a clock that only goes forward, of this machine alone.
        seconds: How long it took; ``None`` for an event without length.
        step: Training step.
        attempt: Id of the save.
        fields: What else there is to know, JSON.
    """

    name: str
    rank: int
    wall_s: float
    monotonic_s: float
    seconds: float | None = None
    step: int | None = None
    attempt: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    def to_line(self, number: int) -> str:
        """Return the event as one line of JSON; ``number`` counts a rank's events in one start."""
        record: dict[str, Any] = {
            "n": number,
            "name": self.name,
            "rank": self.rank,
            "wall_s": round(self.wall_s, 6),
            "monotonic_s": round(self.monotonic_s, 6),
        }
        if self.seconds is not None:
            record["seconds"] = round(self.seconds, 6)
        record |= {
            k: v for k, v in (("step", self.step), ("attempt", self.attempt)) if v is not None
        }
        record |= {k: v for k, v in self.fields.items() if k not in _OWN}
        try:
            return json.dumps(record, allow_nan=False, default=str, separators=(",", ":"))
        except ValueError:  # not finite, in a field
            plain = {
                k: v for k, v in record.items() if not isinstance(v, float) or math.isfinite(v)
            }
            return json.dumps(plain, default=str, separators=(",", ":"))

    @classmethod
    def from_json(cls, record: Any) -> Event:
        """Rebuild an event from a line that has been parsed.

        Raises:
            CorruptCheckpointError: It is not one.
        """
        if not isinstance(record, dict) or not isinstance(record.get("name"), str):
            raise CorruptCheckpointError("a line of telemetry without a name")
        rank, step, attempt = record.get("rank"), record.get("step"), record.get("attempt")
        seconds = record.get("seconds")
        if type(rank) is not int or rank < 0 or not (step is None or type(step) is int):
            raise CorruptCheckpointError(f"a line of telemetry of rank {rank!r}, step {step!r}")
        if not (attempt is None or isinstance(attempt, str)):
            raise CorruptCheckpointError("a line of telemetry whose attempt is no text")
        return cls(
            name=record["name"],
            rank=rank,
            wall_s=_number(record, "wall_s"),
            monotonic_s=_number(record, "monotonic_s"),
            seconds=None if seconds is None else max(_number(record, "seconds"), 0.0),
            step=step,
            attempt=attempt,
            fields={k: v for k, v in record.items() if k not in _OWN},
        )


def _number(record: Mapping[str, Any], name: str) -> float:
    value: Any = record.get(name)
    if type(value) not in (int, float) or not math.isfinite(value) or abs(value) > 1e15:
        raise CorruptCheckpointError(f"a line of telemetry whose {name} is no number")
    return float(value)
