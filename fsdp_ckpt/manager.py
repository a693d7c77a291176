"""CheckpointManager: the one object a training job talks to.

Invariant: all ranks call the same methods in the same order, and leave each with the same outcome.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch

from fsdp_ckpt.commit.catalog import CheckpointInfo, find_checkpoints
from fsdp_ckpt.commit.current_branch import CurrentBranch
from fsdp_ckpt.commit.good import find_good
from fsdp_ckpt.commit.marks import pin
from fsdp_ckpt.commit.publish import new_attempt
from fsdp_ckpt.commit.retention import RetentionPolicy
from fsdp_ckpt.errors import CheckpointError, ClosedError, describe
from fsdp_ckpt.life.run_life import RunLife
from fsdp_ckpt.life.step_outcome import StepOutcome
from fsdp_ckpt.options import SaveMode, SaveOptions
from fsdp_ckpt.ranks.group import RankGroup
from fsdp_ckpt.restoring.report import Allowed, RestoreReport
from fsdp_ckpt.restoring.restorer import Restorer
from fsdp_ckpt.saving.handle import SaveHandle
from fsdp_ckpt.saving.saver import Saver
from fsdp_ckpt.snapshot.buffer import ImagePool
from fsdp_ckpt.stability.save_policy import SavePolicy
from fsdp_ckpt.stability.spike_policy import SpikePolicy
from fsdp_ckpt.storage.open import open_store
from fsdp_ckpt.telemetry.event import Event
from fsdp_ckpt.telemetry.options import TelemetryOptions
from fsdp_ckpt.telemetry.start import start_telemetry
from fsdp_ckpt.writer.job import store_address

if TYPE_CHECKING:
    from fsdp_ckpt.saving.replicas import CheckReplicas
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
        save: When :meth:`after_step` saves; ``None``: never.
        keep: What to keep; the rest is deleted in the background after each save. ``None`` deletes nothing.
        spikes: What counts as a spike of loss or gradient norm, and what is done then; ``None`` watches none.
        options: How a save goes; by default asynchronous.
        num_threads: Threads that read or write, per rank; by default as many as suit the store.
        check_replicas: What to do where replicas of parameters or optimizer state are not bit-equal at a
            save: ``raise`` a RankFailureError, ``warn``, or ``off``. ``None`` warns, and looks at replicated
            shards only where that costs under 2 % of the save.
        storage_options: Passed to the fsspec filesystem.
        telemetry: What to write about saves and restores under ``root/telemetry/``, for ``fsdp-ckpt
            report``; the same on all ranks. ``None`` writes nothing, and costs nothing.
        on_event: Called with each :class:`~fsdp_ckpt.telemetry.Event` of this rank, in order, on a thread of
            its own; each rank may have another one, or none.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        state: TrainState,
        *,
        save: SavePolicy | None = None,
        keep: RetentionPolicy | None = None,
        spikes: SpikePolicy | None = None,
        options: SaveOptions | None = None,
        timeout_s: float = 1800.0,
        num_threads: int | None = None,
        check_replicas: CheckReplicas | None = None,
        storage_options: Mapping[str, Any] | None = None,
        telemetry: TelemetryOptions | None = None,
        on_event: Callable[[Event], None] | None = None,
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
        branch = CurrentBranch(self._root)
        self._telemetry = start_telemetry(self._root, self._group, new_attempt, telemetry, on_event)
        self._saver = Saver(
            self._root,
            self._group,
            background,
            self._options,
            self._pool,
            branch,
            address=store_address(root, fs_options),
            num_threads=num_threads,
            check=check_replicas,
            telemetry=self._telemetry,
        )
        restorer = Restorer(
            self._root,
            self._group,
            fs_options,
            self._pool,
            branch,
            num_threads=num_threads,
            telemetry=self._telemetry,
        )
        self._life = RunLife(
            self._root,
            state,
            self._group,
            self._saver,
            restorer,
            branch,
            save=save,
            keep=keep,
            spikes=spikes,
            telemetry=self._telemetry,
        )
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
        self._telemetry.event("run.raised", step=self.state.progress.step, error=describe(error))
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
                self._life.close()
                self._pool.close()
                self._telemetry.event("run.ended", step=self.state.progress.step)
                self._telemetry.close()

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

    def latest(self, *, good: bool = False) -> CheckpointInfo | None:
        """Return the newest whole checkpoint, or ``None``; any rank may call it alone.

        Args:
            good: Only one from which training went on well, as the spike policy judged.
        """
        self._check_open()
        found = (f for f in find_checkpoints(self._root) if isinstance(f, CheckpointInfo))
        return find_good(self._root) if good else next(found, None)

    def pin(self, step: int, note: str = "") -> None:
        """Keep the checkpoint of a step, whatever the policy; any rank may call it alone.

        Raises:
            NotFoundError: There is none, or it is being deleted.
        """
        self._check_open()
        pin(self._root, step, note)

    # --- the training loop ---

    def before_update(self, *, loss: Any, grad_norm: Any = None) -> bool:
        """Return whether to make the update, for ``on_outlier="skip_update"``; called by every rank.

        If not, drop the gradients, and go on with ``progress.advance`` and :meth:`after_step`, which takes no
        loss then. An exchange between all ranks, in the place of that of :meth:`after_step`.

        Args:
            loss: As of :meth:`after_step`.
            grad_norm: Likewise.

        Raises:
            MismatchError: A loss is missing.
        """
        self._check_open()
        return self._life.before_update(loss, grad_norm)

    def after_step(
        self,
        *,
        loss: Any = None,
        grad_norm: Any = None,
        metrics: Mapping[str, float] | None = None,
    ) -> StepOutcome:
        """Do what the policies say is due; called by every rank after each step and its ``progress.advance``.

        Saves, goes back after a spike, or leaves one committed checkpoint and says that the run is to end.
        Takes microseconds, but for the looks that ``docs/stability.md`` tells of.

        Args:
            loss: Of this rank's batch, a number or a tensor of one element; needed with a spike policy.
            grad_norm: Before clipping, likewise; on all ranks or on none.
            metrics: Scores of a checkpoint that is saved now, for ``RetentionPolicy(best=…, metric=…)``.

        Returns:
            What was done, the same on all ranks.

        Raises:
            CheckpointError: The run went wrong, and is not to go back again; or what :meth:`save` and
                :meth:`restore` raise.
            MismatchError: Ranks are not at the same step, or a loss is missing.
        """
        self._check_open()
        return self._life.after_step(self._options.mode, loss, grad_norm, metrics)

    @property
    def should_stop(self) -> bool:
        """Whether the loop is to end: the run was told to, or has made the policy's last step."""
        return self._life.should_stop

    @property
    def exit_code(self) -> int:
        """For ``sys.exit``: 75 (``EX_TEMPFAIL``: start me again) where the run was told to end, else 0."""
        return self._life.exit_code

    @property
    def lr_factor(self) -> float:
        """What ``optimizer.step()`` multiplies learning rates with; 1 but for a while after a spike."""
        return self._life.rates.factor

    def notice_preemption(self) -> None:
        """Do as if SIGTERM had come, for notices that come another way; any thread of any rank may."""
        self._life.notice()

    # --- by hand ---

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
            AlreadyCommittedError: The step has a checkpoint already, on the current branch.
            IncompleteWriteError: A rank failed to write, in this save or in an earlier one that was still
                under way; nothing was committed of that one. Or every image is in use, and ``on_busy`` is
                ``error``.
            RankFailureError: A rank did not answer in time, or replicas differ and must not.
        """
        self._check_open()
        return self._life.save(mode or self._options.mode)

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
        reported and marked, and a later save of its step replaces it. A root without any checkpoint starts
        fresh: the live state stays as it is. Going on from a ``step`` that is not the newest is a rollback,
        which the first save records.

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
        return self._life.restore(step, allowed)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the manager is closed; make a new one")
