"""Which checkpoints a run still stands on, after it has gone back.

    steps     0    10    20    30    40
    gen 0     ●────●─────●─────○             rollback 1: from 33 to 20
    gen 1                └─────●─────○       rollback 2: from 41 to 30
    gen 2                      └─────●

Every rollback begins a branch; a checkpoint's *generation* is the number of its branch. Rollback ``n``
abandons what is of a generation below ``n`` and lies beyond the step that it went back to.

Invariant: on the current branch every step was saved once, and the order by step is the order by (generation,
step): branch ``n`` saves nothing below the step at which it began, nor at it, where the checkpoint is that it
went back to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from fsdp_ckpt.errors import IncompleteWriteError

__all__ = ["BranchHistory", "DataWindow", "Rollback", "merge_windows"]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class DataWindow:
    """Data that no step may consume again.

    Args:
        epoch: Epoch whose order is meant.
        start: First position in it, in samples over all ranks.
        stop: One past the last.
    """

    epoch: int
    start: int
    stop: int

    def __post_init__(self) -> None:
        if self.epoch < 0 or not 0 <= self.start < self.stop:
            raise ValueError(
                f"epoch {self.epoch}, positions {self.start} to {self.stop} are no window of data"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """A decision to go back.

    Args:
        generation: Its number, from 1, and that of the branch that it begins.
        id: Unique; sorts by time as attempts do.
        from_step: Step at which it was decided.
        to_step: Step of the checkpoint that it goes back to.
        attempt: Of that checkpoint.
        reason: One line.
        skip: Data to leave out from then on.
        lr_factor: What the learning rate is multiplied with, for a while.
        lr_steps: For how many steps after ``to_step``.
        created: ISO 8601, UTC.
    """

    generation: int
    id: str
    from_step: int
    to_step: int
    attempt: str
    reason: str
    skip: tuple[DataWindow, ...] = ()
    lr_factor: float = 1.0
    lr_steps: int = 0
    created: str = ""

    def __post_init__(self) -> None:
        if self.generation < 1 or self.lr_steps < 0:
            raise ValueError(
                f"generation {self.generation} and lr_steps {self.lr_steps} of a rollback"
            )
        if not 0 <= self.to_step <= self.from_step:
            raise ValueError(f"from step {self.from_step} one cannot go back to {self.to_step}")
        if not 0 < self.lr_factor <= 1:
            raise ValueError(f"lr_factor must be in (0, 1], not {self.lr_factor}")


@dataclass(frozen=True)
class BranchHistory:
    """All rollbacks of a run, in order; without any, the run has one branch.

    Args:
        rollbacks: Number 1 first.
    """

    rollbacks: tuple[Rollback, ...] = field(default=())

    @property
    def generation(self) -> int:
        """Number of rollbacks so far: the generation of what is saved now."""
        return len(self.rollbacks)

    @property
    def furthest_step(self) -> int:
        """The furthest step at which the run has gone back; -1 without rollbacks."""
        return max((r.from_step for r in self.rollbacks), default=-1)

    def abandoned_by(self, generation: int, step: int) -> Rollback | None:
        """Return the first rollback that has left a checkpoint behind; ``None``: the run stands on it."""
        return next((r for r in self.rollbacks[generation:] if step > r.to_step), None)

    def check_save(self, generation: int, step: int) -> None:
        """Refuse what would not be on the current branch, before it is published.

        Raises:
            IncompleteWriteError: The run has gone back since this save began, or ``step`` is not beyond the
                step at which its branch began.
        """
        if generation != self.generation:
            raise IncompleteWriteError(
                f"the save of step {step} is of generation {generation}, but the run is at {self.generation} "
                "by now: it went back since; nothing was committed",
                step=step,
            )
        if self.rollbacks and step <= self.rollbacks[-1].to_step:
            raise IncompleteWriteError(
                f"step {step} is not beyond {self.rollbacks[-1].to_step}, where generation {generation} "
                "began; go back by another rollback before saving there",
                step=step,
            )

    # --- what a rollback asks of training from then on ---

    @cached_property
    def skipped_data(self) -> tuple[DataWindow, ...]:
        """Windows of all rollbacks, in order and without overlaps.

        Also those of branches that were abandoned: who goes back further has their data before it again.
        """
        return merge_windows(w for r in self.rollbacks for w in r.skip)

    def lr_factor(self, step: int) -> float:
        """Return what the learning rate of the step after ``step`` is multiplied with; 1 for most."""
        factor = 1.0
        for rollback in self.rollbacks:
            if rollback.to_step <= step < rollback.to_step + rollback.lr_steps:
                factor *= rollback.lr_factor
        return factor

    def num_in_a_row(self) -> int:
        """Return how many rollbacks there were at one place, the last one counted.

        One that goes back to a checkpoint from beyond all trouble before it starts the count anew: a long run
        may go back often, but not for ever at one place.
        """
        count, furthest = 0, -1
        for rollback in self.rollbacks:
            count = 1 if rollback.to_step >= furthest else count + 1
            furthest = max(furthest, rollback.from_step)
        return count


def merge_windows(windows: Iterable[DataWindow]) -> tuple[DataWindow, ...]:
    """Return windows in order, those that touch as one."""
    merged: list[DataWindow] = []
    for window in sorted(windows):
        last = merged[-1] if merged else None
        if last is not None and last.epoch == window.epoch and window.start <= last.stop:
            stop = max(last.stop, window.stop)
            merged[-1] = DataWindow(epoch=last.epoch, start=last.start, stop=stop)
        else:
            merged.append(window)
    return tuple(merged)
