"""What a trainer tells a writer of an image on its way: what its file is called, and how far it is filled.

Invariant: whoever waits is woken, by what was waited for or by the error that ended the filling.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from fsdp_ckpt.errors import StorageError, describe

__all__ = ["FileName", "Handover"]


class FileName(NamedTuple):
    """What follows from the ranks' agreement to save.

    Args:
        key: Of the new object, in the store.
        digests_at: Where in the header the digests go, in bytes; once all is filled, those that are known or
            ``NO_DIGEST`` stand there.
    """

    key: str
    digests_at: int


class Handover:
    """Of one image; one thread fills it from the start, others use what is there.

    Args:
        name: Of its file; by default it is told later.
    """

    def __init__(self, name: FileName | None = None) -> None:
        self.is_named_later = name is None
        self._changed = threading.Condition()
        self._name = name
        self.num_bytes = 0  # filled so far
        self._error: BaseException | None = None

    def name(self, name: FileName) -> None:
        """Say what the file is called."""
        with self._changed:
            self._name = name
            self._changed.notify_all()

    def filled(self, num_bytes: int) -> None:
        """Say that the first ``num_bytes`` are there."""
        with self._changed:
            if self._error is None:  # what comes after a gap is not filled from the start
                self.num_bytes = max(self.num_bytes, num_bytes)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Say that no more will come."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def wait_named(self) -> FileName:
        """Return the file's name as soon as there is one.

        Raises:
            StorageError: The filling ended before.
        """
        self._wait(lambda: self._name is not None)
        if self._name is None:
            raise AssertionError("no name")
        return self._name

    def wait_filled(self, num_bytes: int) -> None:
        """Return when the first ``num_bytes`` are filled.

        Raises:
            StorageError: The filling ended before.
        """
        self._wait(lambda: self.num_bytes >= num_bytes)

    def _wait(self, is_there: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or is_there())
            if not is_there():
                cause = self._error
                what = describe(cause) if cause is not None else "stopped"
                raise StorageError(f"the snapshot was not finished: {what}") from cause
