"""What the rooms that save and restore say what they do with; where telemetry is off, all of it does nothing.

Invariant: off, no call makes an object, takes a lock or reads a clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fsdp_ckpt.telemetry.event import Event
from fsdp_ckpt.telemetry.restore_trace import NO_RESTORE, RestoreTrace
from fsdp_ckpt.telemetry.save_trace import NO_SAVE, SaveTrace

__all__ = ["OFF", "Telemetry"]


class Telemetry:
    """Makes events of what it is told; any thread may call it.

    Args:
        put: Takes each event, at once; ``None``: off.
        rank: This rank.
        progress_s: Seconds between two events of progress; ``None`` for none.
        close: Ends what ``put`` leads to.
    """

    def __init__(
        self,
        put: Callable[[Event], None] | None = None,
        *,
        rank: int = 0,
        progress_s: float | None = None,
        close: Callable[[], None] | None = None,
    ) -> None:
        self._put = put
        self._rank = rank
        self._progress_s = progress_s
        self._progressed_s: float | None = None
        self._close = close

    def event(
        self, name: str, *, step: int | None = None, attempt: str | None = None, **fields: Any
    ) -> None:
        """Tell of something without length that has happened now."""
        if self._put is not None:
            self.emit(name, time.monotonic(), None, step=step, attempt=attempt, **fields)

    def emit(
        self,
        name: str,
        begun_s: float,
        ended_s: float | None,
        *,
        step: int | None = None,
        attempt: str | None = None,
        **fields: Any,
    ) -> None:
        """Tell of something that began and ended at these times of ``time.monotonic``."""
        if self._put is None:
            return
        self._put(
            Event(
                name=name,
                rank=self._rank,
                # Of now, as the clock of the machine may have been put right since it began.
                wall_s=time.time() - (time.monotonic() - begun_s),
                monotonic_s=begun_s,
                seconds=None if ended_s is None else ended_s - begun_s,
                step=step,
                attempt=attempt,
                fields=fields,
            )
        )

    def save(self, step: int, mode: str) -> SaveTrace:
        """Begin to follow a save."""
        return NO_SAVE if self._put is None else SaveTrace(self.emit, step, mode)

    def restore(self) -> RestoreTrace:
        """Begin to follow a restore."""
        return NO_RESTORE if self._put is None else RestoreTrace(self.emit)

    def held(self, begun_s: float) -> None:
        """Tell that training has waited for the rest of a copy, from then until now."""
        if self._put is not None:
            self.emit("save.held", begun_s, time.monotonic())

    def stepped(self, step: int) -> None:
        """Tell at which step the run is, now and then."""
        if self._put is None or self._progress_s is None:
            return
        now_s = time.monotonic()
        if self._progressed_s is None or now_s - self._progressed_s >= self._progress_s:
            self._progressed_s = now_s
            self.emit("progress", now_s, None, step=step)

    def close(self) -> None:
        """Write what is left, and end."""
        if self._close is not None:
            self._close()
            self._close = None


OFF = Telemetry()
