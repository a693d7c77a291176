"""Which checkpoints stay: a decision from facts alone, each part of it with its reason.

Invariant: the newest good checkpoint and the newest of all always stay, and so does whatever may still become
a checkpoint: an attempt under way, or a complete one that the next restore would publish.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fsdp_ckpt.commit.inventory import HeldCheckpoint, Inventory, LooseAttempt, begun_at

__all__ = ["Doomed", "Kept", "PrunePlan", "RetentionPolicy", "choose_what_to_delete"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """What to keep. Each rule keeps for itself; what none keeps is deleted.

    Args:
        last: This many of the newest good checkpoints, 1 or more; and as many of those newer than them, which
            are not judged yet, with the oldest of these, which is judged next. Where no checkpoint is marked
            as good, each counts as good, but in a run that judges them.
        every_steps: Those of every n-th step, for ever.
        epochs: The first one of each epoch but the first, for ever: the state at the epoch's end where
            checkpoints are saved there.
        best: This many of the best by ``metric``.
        metric: Name of a score.
        highest: Whether a higher score is better.
        grace_s: How old, in seconds, an attempt without a manifest or a checkpoint of a branch that was left
            must be before it is deleted; more than any save takes.
    """

    last: int = 3
    every_steps: int | None = None
    epochs: bool = False
    best: int = 0
    metric: str | None = None
    highest: bool = False
    grace_s: float = 6 * 3600.0

    def __post_init__(self) -> None:
        if self.last < 1:
            raise ValueError(f"last must be at least 1, not {self.last}: the newest always stays")
        if self.every_steps is not None and self.every_steps < 1:
            raise ValueError(f"every_steps must be at least 1, not {self.every_steps}")
        if self.best < 0 or (self.best > 0) != (self.metric is not None):
            raise ValueError(f"best={self.best} and metric={self.metric!r}: give both or none")
        if not self.grace_s >= 0:
            raise ValueError(f"grace_s must be 0 or more, not {self.grace_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A checkpoint that stays.

    Args:
        step: Training step.
        attempt: Id of its save.
        reasons: Why, one per rule that keeps it.
    """

    step: int
    attempt: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Doomed:
    """What is to be deleted.

    Args:
        step: In whose folder it lies.
        attempt: Id of its save.
        what: ``checkpoint``: with a manifest; ``attempt``: without.
        reason: Why.
        num_bytes: Of its shard files, where a manifest tells.
    """

    step: int
    attempt: str
    what: Literal["checkpoint", "attempt"]
    reason: str
    num_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunePlan:
    """A decision about everything under a root.

    Args:
        keep: Newest first.
        delete: In the order in which it is carried out, the oldest first.
        left_alone: Steps of damaged checkpoints, and of those of a newer format.
    """

    keep: tuple[Kept, ...] = ()
    delete: tuple[Doomed, ...] = ()
    left_alone: tuple[int, ...] = ()


@dataclass(slots=True)
class _Reasons:
    """Why checkpoints stay, by attempt."""

    found: dict[str, list[str]] = field(default_factory=dict)

    def add(self, checkpoints: Sequence[HeldCheckpoint], reason: str) -> None:
        for held in checkpoints:
            self.found.setdefault(held.info.attempt, []).append(reason)


def choose_what_to_delete(
    inventory: Inventory,
    policy: RetentionPolicy,
    *,
    now_s: float,
    resumed_from: str | None = None,
    is_judged: bool = False,
) -> PrunePlan:
    """Decide what stays; pure.

    Args:
        inventory: What there is; with metrics where the policy asks for the best.
        policy: What to keep.
        now_s: Seconds since 1970, by the clock of the ids.
        resumed_from: Attempt of the checkpoint that the run was resumed from, where known. The one that the
            newest rollback went back to stays by itself.
        is_judged: Whether the run finds out which checkpoints are good: none is by default then.
    """
    reasons = _why(inventory, policy, resumed_from, is_judged=is_judged)

    def is_old(attempt: str) -> bool:
        begun = begun_at(attempt)
        return begun is not None and begun < now_s - policy.grace_s

    keep = [_kept(held, reasons.found) for held in inventory.checkpoints if _stays(held, reasons)]
    doomed = [
        Doomed(
            step=held.info.step,
            attempt=held.info.attempt,
            what="checkpoint",
            reason="no rule keeps it",
            num_bytes=held.info.num_bytes,
        )
        for held in inventory.checkpoints
        if not _stays(held, reasons)
    ]
    keep += _pinned_elsewhere(inventory)
    doomed += _abandoned(inventory, is_old)
    newest = inventory.checkpoints[0].info.step if inventory.checkpoints else -1
    for loose in inventory.loose:
        reason = _why_dead(loose, newest, is_old)
        if reason is not None:
            doomed.append(Doomed(step=loose.step, attempt=loose.id, what="attempt", reason=reason))
    return PrunePlan(
        keep=tuple(sorted(keep, key=lambda k: k.step, reverse=True)),
        delete=tuple(sorted(doomed, key=lambda d: (d.step, d.attempt))),
        left_alone=tuple(skipped.step for skipped in inventory.left_alone),
    )


def _why(
    inventory: Inventory, policy: RetentionPolicy, resumed_from: str | None, *, is_judged: bool
) -> _Reasons:
    """Apply every rule to the checkpoints of the current branch."""
    whole = inventory.checkpoints
    usable = [held for held in whole if "corrupt" not in held.marks.kinds]
    marked = [held for held in usable if "good" in held.marks.kinds]
    good = marked if is_judged else marked or usable
    reasons = _Reasons()
    reasons.add(good[: policy.last], f"one of the newest {policy.last} good")
    reasons.add(usable[:1], "the newest")
    newer = [held for held in usable if not good or held.info.step > good[0].info.step]
    reasons.add(newer[: policy.last], "not judged yet")
    # Where saves come faster than judgements, each would be deleted before it can be good.
    reasons.add(newer[policy.last :][-1:], "the next to be judged")
    if policy.every_steps is not None:
        regular = [held for held in usable if held.info.step % policy.every_steps == 0]
        reasons.add(regular, f"a multiple of {policy.every_steps}")
    if policy.epochs:
        firsts = {held.info.epoch: held for held in usable if held.info.epoch}  # the oldest is last
        reasons.add(list(firsts.values()), "the first of its epoch")
    if policy.metric is not None:
        reasons.add(_best(usable, policy, policy.metric), f"among the best by {policy.metric}")
    reasons.add([held for held in whole if "pinned" in held.marks.kinds], "pinned")
    corrupt = [held for held in whole if "corrupt" in held.marks.kinds]
    reasons.add(corrupt, "found damaged: left for a repair")
    last = inventory.history.rollbacks[-1:]
    origins = {resumed_from, *(rollback.attempt for rollback in last)}
    reasons.add([held for held in whole if held.info.attempt in origins], "resumed from")
    return reasons


def _best(
    usable: Sequence[HeldCheckpoint], policy: RetentionPolicy, metric: str
) -> list[HeldCheckpoint]:
    """Return the best by a metric; of equal ones the newer."""
    scored = [held for held in usable if metric in held.marks.metrics]
    sign = -1 if policy.highest else 1
    return sorted(scored, key=lambda h: (sign * h.marks.metrics[metric], -h.info.step))[
        : policy.best
    ]


def _stays(held: HeldCheckpoint, reasons: _Reasons) -> bool:
    return held.info.attempt in reasons.found


def _kept(held: HeldCheckpoint, found: dict[str, list[str]]) -> Kept:
    reasons = tuple(found[held.info.attempt])
    return Kept(step=held.info.step, attempt=held.info.attempt, reasons=reasons)


def _pinned_elsewhere(inventory: Inventory) -> list[Kept]:
    return [
        Kept(step=left.step, attempt=left.attempt, reasons=("pinned",))
        for left in inventory.abandoned
        if left.attempt in inventory.pinned
    ]


def _abandoned(inventory: Inventory, is_old: Callable[[str], bool]) -> list[Doomed]:
    """Return the checkpoints of branches that were left long ago.

    Not at once: the new branch may be saving into the same folders just now, and someone may want to see what
    went wrong.
    """
    rollbacks = inventory.history.rollbacks
    if not rollbacks or not is_old(rollbacks[-1].id):
        return []
    return [
        Doomed(step=left.step, attempt=left.attempt, what="checkpoint", reason=left.reason)
        for left in inventory.abandoned
        if left.attempt is not None and left.attempt not in inventory.pinned
    ]


def _why_dead(loose: LooseAttempt, newest: int, is_old: Callable[[str], bool]) -> str | None:
    """Tell why an attempt can go; ``None`` where it may still become a checkpoint."""
    if loose.is_pruned:
        return "its deletion had begun"
    if not is_old(loose.id):
        return None  # it may be under way
    if not loose.is_recoverable:
        return "never committed, and too old to be under way"
    # A restore looks for complete attempts above the newest whole checkpoint.
    return "complete, but never committed, and the run is past it" if loose.step < newest else None
