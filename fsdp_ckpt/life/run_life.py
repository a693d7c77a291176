"""The life of a run between restore and end: saves when due, goes back after a spike, ends when told to.

    after_step ──> decide together ──┬─> save ──> (committed) ──> marks, retention: in the background
                                     ├─> spike: go back, lower the learning rate, or raise
                                     └─> signal: one committed checkpoint, then the loop is to end

Invariant: what is done is done by all ranks at the same step. A rollback is on record before anything live
changes, so that whatever dies comes back to the branch that was decided.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsdp_ckpt.commit.catalog import CheckpointInfo, SkippedCheckpoint
from fsdp_ckpt.commit.current_branch import CurrentBranch
from fsdp_ckpt.commit.receipt import Attempt
from fsdp_ckpt.commit.retention import RetentionPolicy
from fsdp_ckpt.errors import CheckpointError, RunStoppedError, describe
from fsdp_ckpt.life.housekeeping import Housekeeper
from fsdp_ckpt.life.lowered_rates import LoweredRates
from fsdp_ckpt.life.signals import SignalWatch
from fsdp_ckpt.life.step_outcome import StepOutcome
from fsdp_ckpt.life.stepping import Stepper
from fsdp_ckpt.life.watching import RunWatch
from fsdp_ckpt.life.way_back import WayBack
from fsdp_ckpt.options import SaveMode
from fsdp_ckpt.ranks.group import RankGroup
from fsdp_ckpt.restoring.report import Allowed, RestoreReport
from fsdp_ckpt.restoring.restorer import Restorer
from fsdp_ckpt.saving.handle import SaveHandle
from fsdp_ckpt.saving.saver import Saver
from fsdp_ckpt.stability.save_policy import SavePolicy
from fsdp_ckpt.stability.spike_policy import SpikeDecision, SpikePolicy
from fsdp_ckpt.state.data import ResumableSampler
from fsdp_ckpt.state.data_trail import DataTrail
from fsdp_ckpt.storage.store import Store
from fsdp_ckpt.telemetry.tracing import OFF, Telemetry

if TYPE_CHECKING:
    from fsdp_ckpt.state.train_state import TrainState

__all__ = ["RunLife"]

logger = logging.getLogger("fsdp_ckpt")


class RunLife:
    """Every rank has one; the parts that only the coordinator uses are idle on the others.

    Args:
        root: The run's root.
        state: What is saved and restored.
        group: The ranks.
        saver: Saves.
        restorer: Restores.
        branch: On which this job saves.
        save: When to save by itself; ``None``: never.
        keep: What to keep; ``None`` deletes nothing.
        spikes: What counts as a spike, and what is done then; ``None`` watches nothing.
        telemetry: Is told of what happens.
    """

    def __init__(
        self,
        root: Store,
        state: TrainState,
        group: RankGroup,
        saver: Saver,
        restorer: Restorer,
        branch: CurrentBranch,
        *,
        save: SavePolicy | None,
        keep: RetentionPolicy | None,
        spikes: SpikePolicy | None,
        telemetry: Telemetry = OFF,
    ) -> None:
        self._telemetry = telemetry
        self._state = state
        self._group = group
        self._saver = saver
        self._restorer = restorer
        self._policy = save or SavePolicy(on_signal=False)
        self._is_judging = spikes is not None
        self._keeper = Housekeeper(root, keep, is_judged=self._is_judging, telemetry=telemetry)
        self._signals = SignalWatch() if self._policy.on_signal else None
        self._watch = RunWatch(spikes, self._keeper.good)
        self._way_back = WayBack(
            root, state, group, saver, restorer, branch, self._keeper, self._watch
        )
        # On the coordinator, where alone it is asked.
        self._watch.num_rollbacks = self._way_back.num_rollbacks
        self._stepper = Stepper(
            group,
            state.progress,
            self._policy,
            self._signals,
            self._watch,
            spikes.look_every if spikes else None,
        )
        self.rates = LoweredRates(state)
        self._trail = self._new_trail()
        self._newest: SaveHandle | None = None
        self._replaceable: dict[int, SkippedCheckpoint] = {}  # what the last restore passed over
        self._is_told_to_end = False

    # --- restore ---

    def restore(self, step: int | None, allowed: Allowed) -> RestoreReport:
        """Bring the live state back, and what the run knew; called by every rank."""
        self._saver.finish()  # what is under way may be what is asked for
        report = self._restorer.restore(self._state, step, allowed)
        self._go_on(report, is_new_life=True)
        return report

    def _go_on(self, report: RestoreReport, *, is_new_life: bool) -> None:
        """Take up the run as it was, and what its rollbacks ask of it from then on."""
        history = self._restorer.history
        self._replaceable = {s.step: s for s in report.skipped if not s.torn}
        self.rates.go_on(history, report.run.get("lowered_lr", ()))
        windows = [(w.epoch, w.start, w.stop) for w in history.skipped_data]
        sampler = self._state.progress.cursor
        if isinstance(sampler, ResumableSampler):
            sampler.skip(windows)
        elif windows:
            logger.warning("data is to be skipped, but it is no ResumableSampler: it comes again")
        self._trail = self._new_trail()
        self._stepper.restart(report.step)
        self._newest = None
        if report.step is not None and report.attempt is not None:
            self._keeper.resumed(report.step, report.attempt)
            self._watch.gone_back(report.step)
            self._watch.add_candidate(report.step, report.attempt)
        problem = self._watch.remember(report.run, is_new_life=is_new_life)
        if problem is not None and self._group.is_coordinator:
            logger.warning(problem)

    def _new_trail(self) -> DataTrail | None:
        sampler, step = self._state.progress.cursor, self._state.progress.step
        return DataTrail(sampler, step) if isinstance(sampler, ResumableSampler) else None

    # --- save ---

    def save(
        self,
        mode: SaveMode,
        *,
        metrics: Mapping[str, float] | None = None,
        is_last: bool = False,
    ) -> SaveHandle:
        """Save the state as the checkpoint of its step; called by every rank."""
        step, begun_s = self._state.progress.step, self._watch.now_s()
        notes = _Notes(self, dict(metrics or {}), is_last=is_last)
        handle = self._saver.save(
            self._state,
            mode,
            self._replaceable.get(step),
            notes if self._group.is_coordinator else None,
        )
        if not handle.is_skipped:
            self._watch.saved(begun_s)
            self._stepper.saved_step, self._newest = step, handle
        return handle

    # --- after a step ---

    @property
    def should_stop(self) -> bool:
        """Whether the run is to end: it was told to, or has made its last step."""
        last_step = self._policy.last_step
        is_over = last_step is not None and self._state.progress.step >= last_step
        return self._is_told_to_end or is_over

    @property
    def exit_code(self) -> int:
        """What the program is to end with: 75 where the run was told to end before it was over."""
        return os.EX_TEMPFAIL if self._is_told_to_end else os.EX_OK

    def notice(self) -> None:
        """Do as if this rank had got a signal to end; any thread may call it."""
        if self._signals is not None:
            self._signals.notice()

    def before_update(self, loss: Any, grad_norm: Any) -> bool:
        """Judge the step before its update; return whether to make it. Called by every rank."""
        if self._is_judging:
            spike = self._stepper.judge(loss, grad_norm)
            return spike is None or spike.action == "lower_lr"
        return True

    def after_step(
        self, mode: SaveMode, loss: Any, grad_norm: Any, metrics: Mapping[str, float] | None
    ) -> StepOutcome:
        """Do what is to be done now; called by every rank after each step."""
        if self._is_told_to_end:
            return StepOutcome(should_stop=True, reason="signal")
        step = self._state.progress.step
        if self._newest is not None and self._newest.done():
            self._watch.durable()
        self._watch.stepped()
        self._telemetry.stepped(step)
        if self._trail is not None:
            self._trail.note(step)
        decision = self._stepper.decide(loss, grad_norm)
        reason, is_back = "", False
        if decision.spike is not None:
            reason = decision.spike.reason
            is_back = self._answer_spike(decision.spike)
        saved = None
        if decision.has_signal:
            saved, reason = self._end_with_checkpoint(metrics), "signal"
        elif decision.save is not None and not is_back:
            is_last = decision.save == "last step"
            saved, reason = self.save(mode, metrics=metrics, is_last=is_last), decision.save
        return StepOutcome(
            saved=saved, rolled_back=is_back, should_stop=self.should_stop, reason=reason
        )

    def _end_with_checkpoint(self, metrics: Mapping[str, float] | None) -> SaveHandle | None:
        """Leave one committed checkpoint of this very step; a save of it that is under way is that one."""
        step = self._state.progress.step
        self._telemetry.event("preemption", step=step)
        logger.warning("rank %d: told to end; step %d is the last", self._group.rank, step)
        self._saver.finish()
        handle = None
        is_saved = self._stepper.saved_step == step and not (
            self._newest is not None and self._newest.has_failed
        )
        if not is_saved:
            try:
                handle = self.save("sync", metrics=metrics, is_last=True)
            except CheckpointError as e:
                # Of a save before it, perhaps, which no call had said yet: all ranks are told alike.
                logger.warning("rank %d: %s; saving once more", self._group.rank, e)
                self._telemetry.event("save.retried", step=step, error=describe(e))
                handle = self.save("sync", metrics=metrics, is_last=True)
        self._is_told_to_end = True
        return handle

    # --- spikes ---

    def _answer_spike(self, spike: SpikeDecision) -> bool:
        """Do what the policy says; return whether the run has gone back."""
        if self._group.is_coordinator:
            logger.warning("%s: %s", spike.reason, spike.action)
        self._telemetry.event("spike", step=spike.step, reason=spike.reason, action=spike.action)
        if spike.action == "stop":
            raise RunStoppedError(
                f"the run went wrong and was stopped: {spike.reason}; look at data and learning rate, or go "
                "on from an older checkpoint",
                step=spike.step,
            )
        if spike.action == "lower_lr":
            self.rates.lower(spike.lr_factor, spike.lr_steps)
        if spike.action == "roll_back":
            first, stop = spike.skip_steps or (spike.step, spike.step + 1)
            windows = self._trail.windows(first, stop) if self._trail is not None else []
            left, begun_s = self._state.progress.step, self._watch.now_s()
            self._go_on(self._way_back.go(spike, first, windows), is_new_life=False)
            self._telemetry.emit(
                "rollback",
                begun_s,
                self._watch.now_s(),
                step=self._state.progress.step,
                from_step=left,
                reason=spike.reason,
            )
            return True
        return False

    # --- the end ---

    def close(self) -> None:
        """End what runs in the background; saves have ended by now. Signal handlers are as before."""
        if self._signals is not None:
            self._signals.close()
        self.rates.close()
        self._keeper.close()


@dataclass(frozen=True, slots=True)
class _Notes:
    """What goes along with one save."""

    life: RunLife
    metrics: Mapping[str, float]
    is_last: bool = False

    def facts(self) -> dict[str, Any]:
        facts = self.life._watch.facts(is_last=self.is_last)
        if lowered := self.life.rates.to_json():
            facts["lowered_lr"] = lowered
        return facts

    def follow(self, attempt: Attempt, committed: Future[CheckpointInfo]) -> None:
        self.life._watch.add_candidate(attempt.step, attempt.id)

        def done(future: Future[CheckpointInfo]) -> None:
            if not future.cancelled() and future.exception() is None:
                self.life._keeper.committed(future.result(), self.metrics)

        committed.add_done_callback(done)
