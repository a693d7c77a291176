"""What to do after a step: one decision for all ranks.

    every rank    step, signal?, losses since the last look ──┐
    coordinator   clock, detector, candidates, policy         ├──> save? spike? end?  and when to look next
                                                              ┘
Rules that go by steps and epochs need no exchange: every rank comes to the same by itself. What only some
ranks know, signals, clocks, losses, is looked at together, at steps that all ranks know beforehand: every
``look_every`` steps with a spike policy, otherwise about once a second and at least every 64 steps, or as
rarely as it must be to cost a hundredth of the time. The coordinator names the next such step in its answer.

Invariant: all ranks look at the same steps, and leave with the same decision. It takes the c10d store alone:
no collective, and no waiting for the device but for the losses at a look.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fsdp_ckpt.errors import MismatchError
from fsdp_ckpt.life.signals import SignalWatch
from fsdp_ckpt.life.watching import RunWatch
from fsdp_ckpt.ranks.group import RankGroup
from fsdp_ckpt.stability.save_policy import SavePolicy, SaveReason, StepFacts, merge_facts
from fsdp_ckpt.stability.spike_policy import SpikeDecision
from fsdp_ckpt.state.progress import Progress

__all__ = ["StepDecision", "Stepper"]

# A signal is heard of this soon, and a look may cost this part of the time; but it is never later than that.
LOOK_S = 1.0
MAX_COST = 0.01
MAX_LOOK_S = 10.0
# However fast steps are: the next ones may be slower.
MAX_LOOK_STEPS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDecision:
    """What all ranks do after a step.

    Args:
        save: Why to save, if at all.
        spike: What to do about a spike; ``None`` without one.
        has_signal: Whether a rank was told to end.
    """

    save: SaveReason | None = None
    spike: SpikeDecision | None = None
    has_signal: bool = False


class Stepper:
    """Decides after each step; every rank has one.

    Args:
        group: The ranks.
        progress: Counts of the run.
        policy: When to save.
        signals: What tells this rank to end; ``None`` where nothing does.
        watch: What the coordinator knows of the run; asked there alone.
        look_every: Steps between two looks at losses; ``None`` where none are watched.
    """

    def __init__(
        self,
        group: RankGroup,
        progress: Progress,
        policy: SavePolicy,
        signals: SignalWatch | None,
        watch: RunWatch,
        look_every: int | None,
    ) -> None:
        self._group = group
        self._progress = progress
        self._policy = policy
        self._signals = signals
        self._watch = watch
        self._look_every = look_every
        self._values: list[tuple[int, Any, Any]] = []  # since the last look: step, loss, norm
        self._judged: tuple[int, SpikeDecision | None] | None = None  # before its update
        self._pace = _Pace(watch.now_s)
        self.saved_step: int | None = None
        self._previous = (0, 0)
        self.restart(None)

    def restart(self, saved_step: int | None) -> None:
        """Begin anew from the live state, which is that of a checkpoint where ``saved_step`` says so."""
        self._previous = (self._progress.step, self._progress.epoch)
        self._values, self._judged = [], None
        self._next_look = 0
        self.saved_step = saved_step

    def decide(self, loss: Any, grad_norm: Any) -> StepDecision:
        """Decide; called by every rank after the same steps.

        Args:
            loss: Of this rank's batch, a number or a tensor of one element.
            grad_norm: Before clipping, likewise, or ``None``.

        Raises:
            MismatchError: Ranks are not at the same step, or a loss is missing on a rank.
            RankFailureError: A rank did not answer in time.
        """
        step = self._progress.step
        judged, self._judged = self._judged, None
        if self._look_every is not None and (judged is None or judged[0] != step):
            judged = None
            is_now = len(self._values) + 1 >= self._look_every
            self._values.append((step, _held(loss, is_now), _held(grad_norm, is_now)))
        # By the rules that go by steps and epochs alone.
        due = self._policy.due(self._facts(since_save_s=0.0, has_signal=False), math.inf)
        decision = self._look() if self._is_look(step, due) else StepDecision(save=due)
        self._previous = (step, self._progress.epoch)
        if judged is not None and decision.spike is None:
            return dataclasses.replace(decision, spike=judged[1])
        return decision

    def judge(self, loss: Any, grad_norm: Any) -> SpikeDecision | None:
        """Judge the step that is to be made next, before its update; called by every rank.

        Args:
            loss: As of :meth:`decide`.
            grad_norm: Likewise.

        Raises:
            MismatchError: A loss is missing on a rank.
            RankFailureError: A rank did not answer in time.
        """
        step = self._progress.step + 1

        def combine(votes: list[list[Any]]) -> dict[str, Any] | None:
            spike = self._watch.judge(step, [v[0] for v in votes], [v[1] for v in votes])
            return None if spike is None else dataclasses.asdict(spike)

        answer = self._group.decide(
            "judging the step", lambda: [_number(loss), _number(grad_norm)], combine
        )
        spike = _spike(answer)
        self._judged = (step, spike)
        return spike

    def _is_look(self, step: int, due: SaveReason | None) -> bool:
        if self._look_every is not None and len(self._values) >= self._look_every:
            return True
        is_watching = self._policy.needs_exchange
        if due is not None:
            # What a checkpoint says of the run is as new as itself.
            return is_watching or bool(self._values)
        return is_watching and (step >= self._next_look or self._group.world_size == 1)

    def _facts(self, *, since_save_s: float, has_signal: bool) -> StepFacts:
        return StepFacts(
            step=self._progress.step,
            epoch=self._progress.epoch,
            previous_step=self._previous[0],
            previous_epoch=self._previous[1],
            saved_step=self.saved_step,
            since_save_s=since_save_s,
            has_signal=has_signal,
        )

    def _look(self) -> StepDecision:
        """Tell each other, and decide."""

        def look() -> dict[str, Any]:
            has_signal = self._signals is not None and self._signals.has_signal
            facts = self._facts(since_save_s=self._watch.since_save_s, has_signal=has_signal)
            values = [[s, _number(loss), _number(norm)] for s, loss, norm in self._values]
            return {"facts": dataclasses.asdict(facts), "values": values}

        answer = self._pace.timed(
            lambda: self._group.decide("deciding after the step", look, self._combine)
        )
        self._values = []
        self._next_look = answer["next"]
        return StepDecision(
            save=answer["save"], spike=_spike(answer["spike"]), has_signal=answer["signal"]
        )

    def _combine(self, votes: list[dict[str, Any]]) -> dict[str, Any]:
        """Decide for all; runs on the coordinator."""
        facts = merge_facts([StepFacts(**vote["facts"]) for vote in votes])
        values = [vote["values"] for vote in votes]
        spike = None
        for seen in zip(*values, strict=True):
            spike = self._watch.judge(seen[0][0], [s[1] for s in seen], [s[2] for s in seen])
            if spike is not None:
                break  # what comes after it is of a run that was going wrong
        return {
            "save": self._policy.due(facts, self._watch.interval_s(self._policy)),
            "spike": None if spike is None else dataclasses.asdict(spike),
            "signal": self._policy.on_signal and facts.has_signal,
            "next": facts.step + self._pace.num_steps(facts.step),
        }


class _Pace:
    """How many steps it is from one look to the next."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._looked: tuple[int, float] | None = None  # at which step, when
        self._cost_s = 0.0

    def timed(self, exchange: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        begun = self._clock()
        answer = exchange()
        self._cost_s = self._clock() - begun
        return answer

    def num_steps(self, step: int) -> int:
        now, before = self._clock(), self._looked
        self._looked = (step, now)
        if before is None or step <= before[0]:
            return 1
        step_s = max((now - before[1]) / (step - before[0]), 1e-6)
        look_s = min(max(LOOK_S, self._cost_s / MAX_COST), MAX_LOOK_S)
        return min(max(round(look_s / step_s), 1), MAX_LOOK_STEPS)


def _spike(answer: dict[str, Any] | None) -> SpikeDecision | None:
    """Rebuild a decision that has been JSON."""
    if answer is None:
        return None
    pairs = {name: tuple(answer[name] or ()) for name in ("ranks", "skip_steps")}
    return SpikeDecision(**{**answer, **pairs, "skip_steps": pairs["skip_steps"] or None})


def _held(value: Any, is_now: bool) -> Any:
    """Return a value to look at later: without its graph, and of its own memory."""
    if not hasattr(value, "detach"):
        return value
    detached = value.detach()
    return detached if is_now else detached.clone()


def _number(value: Any) -> float | None:
    """Return a value as a float; waits for the device. A DTensor's is gathered, on all ranks alike."""
    if value is None:
        return None
    whole = value.full_tensor() if hasattr(value, "full_tensor") else value
    try:
        return float(whole)
    except (TypeError, ValueError, RuntimeError) as e:
        raise MismatchError(
            f"a loss or gradient norm of type {type(value).__name__} is no single number ({e})"
        ) from e
