"""One restore as one rank sees it: find, compare, read, agree, apply, one after the other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fsdp_ckpt.errors import describe
from fsdp_ckpt.telemetry.save_trace import Emit

__all__ = ["NO_RESTORE", "RestoreTrace"]


class RestoreTrace:
    """Follows one restore, lap by lap.

    Args:
        emit: Takes what is known; ``None``: off.
    """

    __slots__ = ("_begun_s", "_emit", "_lap_s", "attempt", "step")

    def __init__(self, emit: Emit | None) -> None:
        self._emit = emit
        self._begun_s = self._lap_s = 0.0
        self.step: int | None = None
        self.attempt: str | None = None
        if emit is not None:
            self._begun_s = self._lap_s = time.monotonic()

    def found(self, step: int | None, attempt: str | None) -> None:
        """A checkpoint has been chosen, or none is there."""
        if self._emit is not None:
            self.step, self.attempt = step, attempt
            self.lap("find")

    def lap(self, name: str) -> None:
        """What began with the end of the lap before has ended now."""
        if self._emit is None:
            return
        now_s = time.monotonic()
        self._tell(f"restore.{name}", self._lap_s, now_s)
        self._lap_s = now_s

    def passed_over(self, step: int, reason: str) -> None:
        """A newer checkpoint is damaged, and was not taken."""
        if self._emit is not None:
            self._emit("restore.passed_over", time.monotonic(), None, step=step, reason=reason)

    def failed(self, error: BaseException) -> None:
        """This checkpoint could not be restored; perhaps another one can."""
        if self._emit is not None:
            self._tell("restore.failed", time.monotonic(), None, error=describe(error))

    def done(self, skipped: Sequence[Any], *, is_coordinator: bool, from_memory: int = 0) -> None:
        """The state is back, or the run starts fresh."""
        if self._emit is None:
            return
        if is_coordinator:
            for passed in skipped:
                self.passed_over(passed.step, passed.reason)
        how = {"fresh": self.step is None, "bytes_from_memory": from_memory}
        self._tell("restore.done", self._begun_s, time.monotonic(), **how)

    def _tell(self, name: str, begun_s: float, ended_s: float | None, **fields: Any) -> None:
        if self._emit is not None:
            self._emit(name, begun_s, ended_s, step=self.step, attempt=self.attempt, **fields)


NO_RESTORE = RestoreTrace(None)
