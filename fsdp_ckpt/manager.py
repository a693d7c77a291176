"""CheckpointManager: the one object a training job talks to.

Invariant: all ranks call the same methods in the same order, and leave each with the same outcome.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch

from fsdp_ckpt.commit.catalog import CheckpointInfo, SkippedCheckpoint, find_checkpoints
from fsdp_ckpt.errors import CheckpointError, ClosedError, describe
from fsdp_ckpt.options import SaveMode, SaveOptions
from fsdp_ckpt.ranks import RankGroup
from fsdp_ckpt.restore_report import Allowed, RestoreReport
from fsdp_ckpt.restoring import Restorer
from fsdp_ckpt.save_handle import SaveHandle
from fsdp_ckpt.saving import Saver
from fsdp_ckpt.snapshot.buffer import ImagePool
from fsdp_ckpt.storage.open import open_store
from fsdp_ckpt.writer.job import store_address

if TYPE_CHECKING:
    from fsdp_ckpt.replicas import CheckReplicas
    from fsdp_ckpt.state.train_state import TrainState

__all__ = ["CheckpointManager"]

logger = logging.getLogger("fsdp_ckpt")

REPORT_GRACE_S = 10.0


class CheckpointManager:
    """Saves and restores a training run under one root; every rank of the job has its own instance.

    Args:
        root: A path, or any URL that fsspec knows; made by the first save.
        state: What is saved and restored.
        timeout_s: How long a rank waits for the others in one exchange, in seconds; must cover the slowest
            rank's writing.
        options: How a save goes; by default asynchronous.
        num_threads: Threads that read or write, per rank; by default as many as suit the store.
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
        options: SaveOptions | None = None,
        timeout_s: float = 1800.0,
        num_threads: int | None = None,
        check_replicas: CheckReplicas | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.state = state
        self._options = options or SaveOptions()
        fs_options = dict(storage_options or {})
        self._root = open_store(root, **fs_options)
        self._group = RankGroup.of(timeout_s)
        # A rank may use up its deadline for writing before it reports.
        background = RankGroup.of(timeout_s + 2 * REPORT_GRACE_S, lingers=True)
        # Restores read into the memory that saves copy into: it is touched once.
        self._pool = ImagePool(self._options.max_in_flight, pin=torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch lacks types
        self._saver = Saver(
            self._root,
            self._group,
            background,
            self._options,
            self._pool,
            address=store_address(root, fs_options),
            num_threads=num_threads,
            check=check_replicas,
        )
        self._restorer = Restorer(
            self._root, self._group, fs_options, self._pool, num_threads=num_threads
        )
        self._damaged: dict[
            int, SkippedCheckpoint
        ] = {}  # what the last restore passed over, by step
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except CheckpointError as e:  # the error under way is the one to know
            logger.error("a save failed: %s", describe(e))

    def close(self) -> None:
        """Finish what is under way, and release buffers and writer; closing twice is fine.

        Raises:
            CheckpointError: A save in the background failed, and no call has said so yet.
        """
        if not self._closed:
            self._closed = True
            try:
                self._saver.close()
            finally:
                self._pool.close()

    @property
    def writer_pid(self) -> int | None:
        """Process id of this rank's writer process; ``None`` before it has been needed."""
        return self._saver.writer_pid

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

    def save(self, *, mode: SaveMode | None = None) -> SaveHandle:
        """Save the state as the checkpoint of ``state.progress.step``; called by every rank.

        Args:
            mode: When to return, for this save; by default as the options say.

        Returns:
            A handle. In mode ``sync`` the checkpoint is committed and durable. In mode ``async`` the live
            state may change again. In mode ``lazy`` parameters and optimizer state may change again after
            ``handle.wait_staged()``, for which ``optimizer.step()`` waits by itself.

        Raises:
            UnencodableStateError: A value cannot be saved; nothing was written.
            MismatchError: Ranks contradict each other about the state or the step; nothing was written.
            AlreadyCommittedError: The step has a checkpoint already.
            IncompleteWriteError: A rank failed to write, in this save or in an earlier one that was still
                under way; nothing was committed of that one. Or every image is in use, and ``on_busy`` is
                ``error``.
            RankFailureError: A rank did not answer in time, or replicas differ and must not.
        """
        self._check_open()
        step = self.state.progress.step
        return self._saver.save(self.state, mode or self._options.mode, self._damaged.get(step))

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
        self._saver.finish()  # what is under way may be what is asked for
        report = self._restorer.restore(self.state, step, allowed)
        self._damaged = {s.step: s for s in report.skipped if not s.torn}
        return report

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the manager is closed; make a new one")
