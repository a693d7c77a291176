"""When to save: a decision from a policy and from facts.

Invariant: it is made once, for all ranks. Steps and epochs are the same on every rank; of the clocks only the
coordinator's counts; a signal to any rank is a signal to all. Where ``needs_exchange`` is false, every rank
comes to the same decision by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fsdp_ckpt.errors import MismatchError
from fsdp_ckpt.stability.interval import daly_interval

__all__ = ["SavePolicy", "SaveReason", "StepFacts", "merge_facts"]

# Soon, since nothing is saved yet; and no sooner, so that a save which takes long is measured by then.
FIRST_AUTO_S = 60.0

SaveReason: TypeAlias = Literal["signal", "last step", "epoch end", "steps", "minutes", "auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What one rank knows after a step.

    Args:
        step: Optimizer steps done.
        epoch: Epochs finished.
        previous_step: At the look before this one; at the first one, that of the restored state or 0.
        previous_epoch: Likewise.
        saved_step: Of the last checkpoint saved or restored; ``None`` without.
        since_save_s: Since the last save took its last bit of training time, or since training began, in
            seconds, by this rank's clock.
        has_signal: Whether this rank was told to end.
    """

    step: int
    epoch: int = 0
    previous_step: int = 0
    previous_epoch: int = 0
    saved_step: int | None = None
    since_save_s: float = 0.0
    has_signal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePolicy:
    """When to save; each rule for itself.

    Args:
        every_steps: After every n-th step.
        every_minutes: When so long has gone by since the last save.
        epoch_ends: At the first look at which an epoch has ended: with its last step where that ends it,
            ``progress.next_epoch()`` before the look.
        last_step: The run's last step.
        on_signal: When a rank is told to end by a signal.
        auto: At the interval that loses the least time, from the measured cost of a save and ``mtbf_s``.
        mtbf_s: Mean time between failures of the whole job, in seconds; by default learned from the run's
            own history.
    """

    every_steps: int | None = None
    every_minutes: float | None = None
    epoch_ends: bool = False
    last_step: int | None = None
    on_signal: bool = True
    auto: bool = False
    mtbf_s: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("every_steps", self.every_steps), ("last_step", self.last_step)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        for name, time in (("every_minutes", self.every_minutes), ("mtbf_s", self.mtbf_s)):
            if time is not None and not time > 0:
                raise ValueError(f"{name} must be above 0, not {time}")
        if self.mtbf_s is not None and not self.auto:
            raise ValueError("mtbf_s is for auto=True alone")

    @property
    def needs_exchange(self) -> bool:
        """Whether ranks must tell each other something: by a clock or a signal, each decides otherwise."""
        return self.every_minutes is not None or self.auto or self.on_signal

    def interval_s(
        self, cost_s: float | None, mtbf_s: float, persist_s: float = 0.0
    ) -> float | None:
        """Return the interval of ``auto``, in seconds; ``None`` without it, or before a save was measured.

        Args:
            cost_s: What a save takes from training, in seconds, where known.
            mtbf_s: As learned; the policy's own wins.
            persist_s: How long one is written in the background: no save begins before the last is durable.
        """
        if not self.auto or cost_s is None:
            return None
        # A save that costs nothing measurable still costs.
        return max(daly_interval(max(cost_s, 1e-3), self.mtbf_s or mtbf_s), persist_s)

    def due(self, facts: StepFacts, interval_s: float | None = None) -> SaveReason | None:
        """Decide whether to save now; pure.

        Args:
            facts: Of all ranks, see :func:`merge_facts`.
            interval_s: Of ``auto``; without it, a minute, until a save was measured.

        Returns:
            The first rule that says so, or ``None``. A step that is saved already is never due again.
        """
        if facts.step == facts.saved_step:
            return None
        if self.on_signal and facts.has_signal:
            return "signal"
        if self.last_step is not None and facts.previous_step < self.last_step <= facts.step:
            return "last step"
        if self.epoch_ends and facts.epoch > facts.previous_epoch:
            return "epoch end"
        # Several steps may be reported at once.
        n = self.every_steps
        if n is not None and facts.step // n > facts.previous_step // n:
            return "steps"
        if self.every_minutes is not None and facts.since_save_s >= 60 * self.every_minutes:
            return "minutes"
        if self.auto and facts.since_save_s >= (FIRST_AUTO_S if interval_s is None else interval_s):
            return "auto"
        return None


def merge_facts(facts: Sequence[StepFacts]) -> StepFacts:
    """Return what all ranks go by, from what each knows; deterministic.

    Args:
        facts: In rank order; the first is the coordinator's, whose clock counts.

    Raises:
        MismatchError: Ranks are not at the same step.
    """
    first = facts[0]
    for rank, its in enumerate(facts):
        if (its.step, its.epoch) != (first.step, first.epoch):
            raise MismatchError(
                f"rank 0 is at step {first.step} of epoch {first.epoch}, rank {rank} at step {its.step} of "
                f"epoch {its.epoch}; advance the progress of all ranks alike",
                rank=rank,
                step=its.step,
            )
    return StepFacts(
        step=first.step,
        epoch=first.epoch,
        previous_step=first.previous_step,
        previous_epoch=first.previous_epoch,
        saved_step=first.saved_step,
        since_save_s=first.since_save_s,
        has_signal=any(its.has_signal for its in facts),
    )
