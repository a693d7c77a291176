"""What a DeepSpeed engine counts for itself, and its loss scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdp_ckpt.errors import MismatchError, UnencodableStateError
from fsdp_ckpt.state.progress import Progress
from fsdp_ckpt.state.saved import RestorePlan, SavedState

__all__ = ["EngineProgress", "plan_engine"]

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
# What changes of a dynamic loss scale; the rest of it is configuration.
_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class EngineProgress:
    """A part of the training state: an engine's counters, and the loss scale where it is dynamic.

    Args:
        engine: A DeepSpeed engine.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, Any]:
        """Return the counters; the same on every rank.

        Raises:
            UnencodableStateError: Gradients of some micro-batches are accumulated: they are not saved.
        """
        engine = self._engine
        accumulated = engine.micro_steps % engine.gradient_accumulation_steps()
        if accumulated:
            raise UnencodableStateError(
                f"engine: gradients of {accumulated} of {engine.gradient_accumulation_steps()} micro-batches "
                "are accumulated, which are not saved; save after the step of the last one",
                key="engine",
            )
        state: dict[str, Any] = {name: getattr(engine, name) for name in _COUNTERS}
        scaler = self._scaler()
        if scaler is not None:
            state["loss_scale"] = {name: getattr(scaler, name) for name in _SCALE}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the counters back; a loss scale only where it is dynamic here too.

        Raises:
            MismatchError: A counter is missing; nothing has changed.
        """
        missing = [name for name in _COUNTERS if type(state.get(name)) is not int]
        if missing:
            raise MismatchError(f"engine: {', '.join(missing)} missing; expected integers")
        self._count(**{name: state[name] for name in _COUNTERS})
        scaler = self._scaler()
        if scaler is not None:
            for name, value in (state.get("loss_scale") or {}).items():
                if name in _SCALE:
                    setattr(scaler, name, value)

    def follow(self, progress: Progress) -> None:
        """Count as an engine that has come where ``progress`` is: for the checkpoint of another framework."""
        self._count(
            global_steps=progress.step,
            global_samples=progress.samples,
            micro_steps=0,
            skipped_steps=0,
        )

    def _count(self, *, micro_steps: int, **counters: int) -> None:
        engine = self._engine
        for name, value in counters.items():
            setattr(engine, name, value)
        per_step = engine.gradient_accumulation_steps()
        # Accumulation begins anew, also where the number of micro-batches is another one than it was.
        is_whole = micro_steps and micro_steps % per_step == 0
        engine.micro_steps = micro_steps if is_whole else engine.global_steps * per_step

    def _scaler(self) -> Any:
        scaler = getattr(self._engine.optimizer, "loss_scaler", None)
        return scaler if getattr(scaler, "dynamic", False) else None


def plan_engine(saved: SavedState, plan: RestorePlan, *, is_engine: bool) -> bool:
    """Plan what engines count, where only one side is an engine; return whether that is so.

    A plain model has no use for it, and an engine can follow from the step: no reason to refuse.

    Args:
        saved: What the checkpoint offers.
        plan: Is added to.
        is_engine: Whether the live state is an engine's.
    """
    paths = list(saved.under("engine"))
    if paths and not is_engine:
        plan.dropped.append("engine")
        plan.left_out.extend(paths)
    elif is_engine and not paths:
        plan.derived.append("engine")
    return bool(paths) != is_engine
