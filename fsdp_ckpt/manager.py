"""CheckpointManager: the one object a training job talks to.

Invariant: all ranks call the same methods in the same order, and leave each with the same outcome.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from fsdp_ckpt.commit.catalog import CheckpointInfo, find_checkpoints
from fsdp_ckpt.errors import ClosedError
from fsdp_ckpt.ranks import RankGroup
from fsdp_ckpt.restore_report import Allowed, RestoreReport
from fsdp_ckpt.restoring import Restorer
from fsdp_ckpt.saving import Saver
from fsdp_ckpt.storage.open import open_store

if TYPE_CHECKING:
    from fsdp_ckpt.replicas import CheckReplicas
    from fsdp_ckpt.state.train_state import TrainState

__all__ = ["CheckpointManager", "SaveHandle"]

logger = logging.getLogger("fsdp_ckpt")


class SaveHandle:
    """A save's outcome. This version saves synchronously, so it is done when you hold it."""

    def __init__(self, info: CheckpointInfo) -> None:
        self._info = info

    def wait_staged(self) -> None:
        """Return when the live state may change again."""

    def wait(self) -> CheckpointInfo:
        """Return the committed checkpoint."""
        return self._info

    def done(self) -> bool:
        """Whether the save has ended."""
        return True


class CheckpointManager:
    """Saves and restores a training run under one root; every rank of the job has its own instance.

    Args:
        root: A path, or any URL that fsspec knows; made by the first save.
        state: What is saved and restored.
        timeout_s: How long a rank waits for the others in one exchange, in seconds; must cover the slowest
            rank's writing.
        num_threads: Threads that read or write, per rank.
        check_replicas: What to do where replicas of parameters or optimizer state are not bit-equal at a
            save: ``raise`` a RankFailureError, ``warn``, or ``off``. ``None`` warns, and looks at replicated
            shards only where that costs under 2 % of the save.
        storage_options: Passed to the fsspec filesystem.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        state: TrainState,
        *,
        timeout_s: float = 1800.0,
        num_threads: int = 2,
        check_replicas: CheckReplicas | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.state = state
        options = dict(storage_options or {})
        self._root = open_store(root, **options)
        self._group = RankGroup.of(timeout_s)
        self._saver = Saver(
            self._root, self._group, options, num_threads=num_threads, check=check_replicas
        )
        self._restorer = Restorer(self._root, self._group, options, num_threads=num_threads)
        self._damaged: set[int] = set()  # steps that the last restore passed over as damaged
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the buffers; closing twice is fine."""
        self._saver.close()
        self._closed = True

    def checkpoints(self) -> list[CheckpointInfo]:
        """Return every whole checkpoint, newest first; any rank may call it alone.

        Raises:
            StorageError: The root cannot be read.
        """
        self._check_open()
        return [
            found for found in find_checkpoints(self._root) if isinstance(found, CheckpointInfo)
        ]

    def latest(self) -> CheckpointInfo | None:
        """Return the newest whole checkpoint, or ``None``; any rank may call it alone."""
        self._check_open()
        return next(
            (f for f in find_checkpoints(self._root) if isinstance(f, CheckpointInfo)), None
        )

    def save(self) -> SaveHandle:
        """Save the state as the checkpoint of ``state.progress.step``; called by every rank.

        Returns:
            A handle; the checkpoint is committed and durable.

        Raises:
            UnencodableStateError: A value cannot be saved; nothing was written.
            MismatchError: Ranks contradict each other about the state or the step; nothing was written.
            AlreadyCommittedError: The step has a checkpoint already.
            IncompleteWriteError: A rank failed to write; nothing was committed.
            RankFailureError: A rank did not answer in time, or replicas differ and must not.
        """
        self._check_open()
        step = self.state.progress.step
        info = self._saver.save(self.state, replace_damaged=step in self._damaged)
        self._damaged.discard(step)
        if self._group.is_coordinator:
            logger.info("saved step %d, %d bytes, to %s", step, info.num_bytes, info.url)
        return SaveHandle(info)

    def restore(
        self,
        step: int | None = None,
        *,
        allow_missing: Iterable[str] = (),
        allow_unexpected: Iterable[str] = (),
        allow_cast: bool = False,
        allow_torn: bool = False,
    ) -> RestoreReport:
        """Bring the live state back; called by every rank, with the same arguments.

        Without ``step``, the newest whole checkpoint; a damaged one is passed over, by all ranks alike, and
        reported, and a later save of its step replaces it. A root without any checkpoint starts fresh: the
        live state stays as it is.

        Args:
            step: The checkpoint to restore; damage is then an error.
            allow_missing: Patterns (``fnmatch``) of live names that the checkpoint may lack.
            allow_unexpected: Patterns of saved names that the live state may lack.
            allow_cast: Load tensors into another dtype.
            allow_torn: Start fresh although saves were begun under this root and none was committed.

        Raises:
            NotFoundError: No such step, or only torn attempts.
            MismatchError: Keys, shapes or dtypes differ; all of them in one error, nothing has changed.
            CorruptCheckpointError: Damaged, and named by ``step`` or the last one there is.
            UnsupportedFormatError: The newest is of a newer format version than this package reads.
            StorageError: The root or a file cannot be read now.
            RankFailureError: A rank did not answer in time.
        """
        self._check_open()
        allowed = Allowed(
            missing=tuple(allow_missing),
            unexpected=tuple(allow_unexpected),
            cast=allow_cast,
            torn=allow_torn,
        )
        report = self._restorer.restore(self.state, step, allowed)
        self._damaged = {s.step for s in report.skipped if not s.torn}
        return report

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the manager is closed; make a new one")
