"""How far a buffer is filled: one thread fills it from the start, others use what is there.

Invariant: whoever waits is woken, by bytes or by the error that ended the filling.
"""

from __future__ import annotations

import threading

from fsdp_ckpt.errors import StorageError, describe

__all__ = ["Watermark"]


class Watermark:
    """The number of bytes filled so far."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_bytes = 0
        self._error: BaseException | None = None

    def advance(self, num_bytes: int) -> None:
        """Say that the first ``num_bytes`` are filled."""
        with self._changed:
            if self._error is None:  # what comes after a gap is not filled from the start
                self._num_bytes = max(self._num_bytes, num_bytes)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Say that no more will come."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def wait_for(self, num_bytes: int) -> None:
        """Return when the first ``num_bytes`` are filled.

        Raises:
            StorageError: The filling ended before.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._num_bytes >= num_bytes)
            if self._num_bytes < num_bytes:
                cause = self._error
                what = describe(cause) if cause is not None else "stopped"
                raise StorageError(f"the snapshot was not finished: {what}") from cause
