"""A save on its way: what its caller holds."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait

from fsdp_ckpt.commit.catalog import CheckpointInfo
from fsdp_ckpt.errors import RankFailureError

__all__ = ["SaveHandle"]


class SaveHandle:
    """One save. All ranks' handles of a save come to the same outcome.

    Args:
        step: What is being saved.
        timeout_s: How long its ranks may take, in seconds.
        staged: Set when the snapshot is taken.
        committed: Resolves to the checkpoint, or to what failed.
        is_skipped: Every image was in use, and the options say to skip then.
    """

    def __init__(
        self,
        step: int,
        timeout_s: float,
        staged: threading.Event | None = None,
        committed: Future[CheckpointInfo] | None = None,
        *,
        is_skipped: bool = False,
    ) -> None:
        self.step = step
        self.is_skipped = is_skipped
        self.is_reported = is_skipped
        self._timeout_s = timeout_s
        self._staged = staged
        self._committed: Future[CheckpointInfo] = committed or Future()

    def wait_staged(self) -> None:
        """Return when the live state may change again; ``optimizer.step()`` waits for that by itself."""
        if self._staged is not None:
            self._staged.wait()

    def wait(self) -> CheckpointInfo | None:
        """Return the committed checkpoint, durable by now; ``None`` for a save that was skipped.

        Raises:
            IncompleteWriteError: A rank failed to write; nothing was committed.
            AlreadyCommittedError: The step had a checkpoint already.
            RankFailureError: A rank did not answer in time.
        """
        if self.is_skipped:
            return None
        # The work behind it keeps its own deadlines; this one only guards against its silence.
        if not wait([self._committed], 3 * self._timeout_s).done:
            raise RankFailureError(
                f"saving step {self.step} took more than {3 * self._timeout_s:g} s", step=self.step
            )
        self.is_reported = True
        return self._committed.result()

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self.is_skipped or self._committed.done()

    @property
    def has_succeeded(self) -> bool:
        """Whether the checkpoint is known to be committed."""
        return self._committed.done() and self._committed.exception() is None

    @property
    def has_failed(self) -> bool:
        """Whether the save is known to have failed."""
        return self._committed.done() and self._committed.exception() is not None
