"""Checkpoints of `transformers.Trainer`, in the place of its own.

    step k: update, on_step_end ── log, evaluate ── next on_step_begin or on_epoch_begin: save step k
    resume: TrainerState from the checkpoint ── Trainer finds epoch and batch ── on_train_begin: everything
            else ── the next on_step_begin or on_epoch_begin, where step k was saved: random states

A step is saved where the next one begins, so that its log lines and scores are in the checkpoint, and random
states are captured and put back at the same point, after the loader has drawn from them.

Invariant: Trainer never writes a checkpoint of its own, whatever asks for one.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from fsdp_ckpt.commit.retention import RetentionPolicy
from fsdp_ckpt.errors import ClosedError, CorruptCheckpointError, MismatchError
from fsdp_ckpt.manager import CheckpointManager
from fsdp_ckpt.options import SaveOptions
from fsdp_ckpt.restoring.report import RestoreReport
from fsdp_ckpt.stability.save_policy import SavePolicy
from fsdp_ckpt.state.rng import capture_random_state, isolated_random_state, restore_random_state
from fsdp_ckpt.state.stateful import Stateful
from fsdp_ckpt.state.train_state import TrainState

__all__ = ["CheckpointCallback"]


class CheckpointCallback(TrainerCallback):
    """Saves and resumes a Trainer's training; the last one of its callbacks, on every rank::

        checkpoints = CheckpointCallback("run-1")
        trainer = Trainer(model, args, train_dataset=data, callbacks=[checkpoints])
        trainer.train(resume_from_checkpoint=checkpoints.resume_from(trainer))

    Saves where ``TrainingArguments.save_strategy`` asks for it (``steps``, ``epoch``), where the policy does,
    or both. After a signal one more step is made, which is not saved: Trainer ends after a step.

    Args:
        root: A path, or any URL that fsspec knows.
        save: When to save, beside what ``TrainingArguments`` says; by default when told to end by a signal.
        keep: What to keep; ``None`` deletes nothing. ``save_total_limit`` is Trainer's own, and not used.
        options: How a save goes.
        extra: As of :class:`~fsdp_ckpt.TrainState`; the name ``trainer`` is taken.
        timeout_s: As of :class:`~fsdp_ckpt.CheckpointManager`.
        storage_options: Passed to the fsspec filesystem.

    Attributes:
        report: What was restored; ``None`` before training begins.
        exit_code: For ``sys.exit``: 75 where training was told to end, else 0.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        save: SavePolicy | None = None,
        keep: RetentionPolicy | None = None,
        options: SaveOptions | None = None,
        extra: Mapping[str, Stateful] | None = None,
        timeout_s: float = 1800.0,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if "trainer" in (extra or {}):
            raise MismatchError("extra has a part named trainer, which is this callback's own")
        self.report: RestoreReport | None = None
        self.exit_code = 0
        self._root = root
        self._policies: dict[str, Any] = {
            "save": save or SavePolicy(),
            "keep": keep,
            "options": options,
        }
        self._where: dict[str, Any] = {"timeout_s": timeout_s, "storage_options": storage_options}
        self._extra = dict(extra or {})
        self._manager: CheckpointManager | None = None
        self._part = _TrainerPart()
        self._resumed: _Resumed | None = None
        self._is_asked = False
        self._looked_at: int | None = None

    def resume_from(self, trainer: Trainer) -> str | None:
        """Return what ``trainer.train(resume_from_checkpoint=…)`` needs; called by every rank.

        Args:
            trainer: The Trainer that has this callback and is about to train.

        Returns:
            A folder with the state that Trainer counts its steps by, which lives as long as this callback;
            ``None`` where there is no checkpoint, and training starts fresh.

        Raises:
            CheckpointError: As of :meth:`~fsdp_ckpt.CheckpointManager.restore`.
        """
        probe = TrainState(extra={"trainer": self._part})
        with (
            isolated_random_state(),
            CheckpointManager(self._root, probe, **self._where) as manager,
        ):
            report = manager.restore(allow_unexpected=["*"])
        if report.step is None:
            return None
        if getattr(trainer.accelerator, "scaler", None) is not None:
            self._extra["scaler"] = trainer.accelerator.scaler
        self._resumed = _Resumed(report.step, self._part.content)
        # Trainer would look for weights of its own here; ours are restored when training begins. There is no
        # public way to say so: this name is in transformers from 4.0 to 5.24 at least.
        trainer._load_from_checkpoint = _load_nothing  # type: ignore[method-assign]  # on purpose
        return self._resumed.folder.name

    # --- Trainer's events ---

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Refuse what only Trainer's own checkpoints can do."""
        if args.save_strategy == "best" or args.load_best_model_at_end:
            raise MismatchError(
                "save_strategy='best' and load_best_model_at_end need Trainer's own checkpoints; use "
                "CheckpointCallback(keep=RetentionPolicy(best=…)) and restore by step"
            )

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Make the manager of this training, and restore what :meth:`resume_from` has found."""
        self._part.attach(state)
        optimizer = kwargs["optimizer"]
        train_state = TrainState(
            model=kwargs["model"],
            optimizer=getattr(optimizer, "optimizer", optimizer),  # without Accelerate's wrapper
            lr_scheduler=kwargs["lr_scheduler"],
            extra={**self._extra, "trainer": self._part},
        )
        self._manager = CheckpointManager(self._root, train_state, **self._policies, **self._where)
        self.report = self._restore(self._manager)
        if self._resumed is not None:
            self._resumed.random_state = capture_random_state({})
            self._resumed.folder.cleanup()
        self._looked_at = state.global_step

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Count the step, and take over Trainer's own save."""
        progress = self._open_manager().state.progress
        samples = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        progress.advance(samples=samples, steps=state.global_step - progress.step)
        return self._take_over(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Count the epoch, and take over Trainer's own save."""
        self._open_manager().state.progress.next_epoch()
        return self._take_over(control)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Save the last step of the epoch before it, if it is due."""
        # Random states of a step in mid-epoch come back after the loader has been made anew.
        if self._resumed is not None and float(state.epoch or 0).is_integer():
            self._put_back_random_states()
        return self._save_if_due(state, control)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Save the step before this one, if it is due."""
        self._put_back_random_states()
        return self._save_if_due(state, control)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Save the last step, if it is due, and wait for what is being written."""
        control = self._save_if_due(state, control)
        manager, self._manager = self._open_manager(), None
        manager.close()
        return control

    def _restore(self, manager: CheckpointManager) -> RestoreReport:
        """Restore the checkpoint that Trainer counts from, and no other."""
        expected = self._resumed.step if self._resumed is not None else None
        report = manager.restore()
        if expected is not None and report.step is not None and report.step > expected:
            # Writers of the job before this one have finished meanwhile; Trainer has its count already.
            report = manager.restore(step=expected)
        if report.step != expected:
            raise CorruptCheckpointError(
                f"training was to begin {_named(expected)}, and can only begin {_named(report.step)}; pass "
                "resume_from_checkpoint=checkpoints.resume_from(trainer), and start again after damage: the "
                "damaged checkpoint is passed over then",
                step=expected,
            )
        return report

    def _take_over(self, control: TrainerControl) -> TrainerControl:
        self._is_asked |= control.should_save
        control.should_save = False
        return control

    def _save_if_due(self, state: TrainerState, control: TrainerControl) -> TrainerControl:
        """Do what is due after the step that is done; once for each step."""
        manager = self._open_manager()
        if self._looked_at == state.global_step or manager.exit_code:
            return control
        self._looked_at = state.global_step
        outcome = manager.after_step()
        if self._is_asked and outcome.saved is None and not manager.exit_code:
            manager.save()
        self._is_asked = False
        self.exit_code = manager.exit_code
        control.should_training_stop |= bool(manager.exit_code)
        return control

    def _put_back_random_states(self) -> None:
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            restore_random_state(resumed.random_state, {})

    def _open_manager(self) -> CheckpointManager:
        if self._manager is None:
            raise ClosedError("no training is under way: trainer.train() was not begun, or ended")
        return self._manager


def _load_nothing(*args: Any, **kwargs: Any) -> None:
    """Stand where Trainer loads weights."""


def _named(step: int | None) -> str:
    return "fresh" if step is None else f"with the checkpoint of step {step}"


class _TrainerPart:
    """Trainer's own counts and history, as a part of the training state."""

    def __init__(self) -> None:
        self.content: dict[str, Any] = {}
        self._state: TrainerState | None = None

    def attach(self, state: TrainerState) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self._state) if self._state is not None else self.content

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # Trainer has taken the content of its file by the time that it has a state of its own.
        self.content = dict(state)


class _Resumed:
    """What Trainer is told of the checkpoint that training goes on from."""

    def __init__(self, step: int, content: dict[str, Any]) -> None:
        self.step = step
        self.random_state: dict[str, Any] = {}
        self.folder = tempfile.TemporaryDirectory(prefix="trainer-state-")
        # Of this name: Trainer's file for its counts in a checkpoint's folder.
        TrainerState(**content).save_to_json(str(Path(self.folder.name) / "trainer_state.json"))
