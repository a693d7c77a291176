"""Which checkpoints stay, from facts alone: each rule keeps for itself, what may still count never goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_ckpt.commit.branches import BranchHistory, Rollback
from fsdp_ckpt.commit.catalog import CheckpointInfo, SkippedCheckpoint
from fsdp_ckpt.commit.inventory import HeldCheckpoint, Inventory, LooseAttempt, begun_at
from fsdp_ckpt.commit.marks import MarkKind, Marks
from fsdp_ckpt.commit.retention import PrunePlan, RetentionPolicy, choose_what_to_delete
from tests.roots import START, attempt_at, now_at

NOW = now_at(100)
OLD, YOUNG = attempt_at(1), attempt_at(99)


def held(
    step: int,
    *kinds: MarkKind,
    epoch: int | None = None,
    metrics: Mapping[str, float] | None = None,
) -> HeldCheckpoint:
    info = CheckpointInfo(
        step=step,
        attempt=f"of-{step}",
        generation=0,
        world_size=2,
        num_bytes=10,
        created="",
        url="",
        epoch=epoch,
    )
    return HeldCheckpoint(info=info, marks=Marks(kinds=frozenset(kinds), metrics=metrics or {}))


def choose(
    checkpoints: Sequence[HeldCheckpoint],
    policy: RetentionPolicy | None = None,
    *,
    resumed_from: str | None = None,
    **more: object,
) -> PrunePlan:
    newest_first = sorted(checkpoints, key=lambda h: h.info.step, reverse=True)
    inventory = Inventory(  # type: ignore[arg-type]
        **{"history": BranchHistory(), "checkpoints": tuple(newest_first), **more}
    )
    policy = policy or RetentionPolicy(last=1)
    return choose_what_to_delete(inventory, policy, now_s=NOW, resumed_from=resumed_from)


def kept(plan: PrunePlan) -> list[int]:
    return [k.step for k in plan.keep]


def deleted(plan: PrunePlan) -> list[int]:
    return [d.step for d in plan.delete]


def loose(step: int, attempt: str, *, recoverable: bool = False, pruned: bool = False) -> object:
    return LooseAttempt(step=step, id=attempt, is_recoverable=recoverable, is_pruned=pruned)


# --- rules ---


def test_the_newest_stay_by_number_not_by_name() -> None:
    """Of 900, 1000, 9000 and 10000, the newest two are the last two."""
    plan = choose([held(s) for s in (900, 1000, 9000, 10000)], RetentionPolicy(last=2))
    assert (kept(plan), deleted(plan)) == ([10000, 9000], [900, 1000])
    assert {d.reason for d in plan.delete} == {"no rule keeps it"}
    assert all(d.num_bytes == 10 and d.what == "checkpoint" for d in plan.delete)


def test_good_ones_count_and_those_not_judged_yet_stay_beside_them() -> None:
    """A candidate never takes the place of a good one, and candidates do not pile up."""
    checkpoints = [
        held(10, "good"),
        held(20, "good"),
        held(25),
        held(30, "good"),
        held(40),
        held(50),
    ]
    assert kept(choose(checkpoints)) == [50, 40, 30]  # 40 is judged next
    plan = choose(checkpoints, RetentionPolicy(last=2))
    assert kept(plan) == [50, 40, 30, 20]
    assert plan.keep[0].reasons == ("the newest", "not judged yet")
    assert plan.keep[2].reasons == ("one of the newest 2 good",)


def test_without_marks_every_checkpoint_counts_as_good() -> None:
    """A run that watches no losses keeps its newest."""
    assert kept(choose([held(s) for s in (10, 20, 30)], RetentionPolicy(last=2))) == [30, 20]


def test_what_a_restore_found_damaged_never_counts() -> None:
    """It stays for a repair, in no one's place."""
    plan = choose([held(10), held(20, "good"), held(30, "good", "corrupt")])
    assert kept(plan) == [30, 20]
    assert plan.keep[0].reasons == ("found damaged: left for a repair",)


def test_every_nth_step_stays() -> None:
    """For ever, beside the newest; step 0 is a multiple too."""
    checkpoints = [held(s) for s in (0, 500, 1000, 1500, 2000, 2001)]
    assert kept(choose(checkpoints, RetentionPolicy(last=1, every_steps=1000))) == [
        2001,
        2000,
        1000,
        0,
    ]


def test_the_first_of_each_epoch_stays() -> None:
    """The state at the epoch's end; not that of the first epoch's beginning, nor without a known epoch."""
    epochs = {10: 0, 20: 0, 30: 1, 40: 1, 50: 2, 60: 2, 70: None}
    checkpoints = [held(step, epoch=epoch) for step, epoch in epochs.items()]
    assert kept(choose(checkpoints, RetentionPolicy(last=1, epochs=True))) == [70, 50, 30]


@pytest.mark.parametrize(("highest", "expected"), [(False, [50, 40, 20]), (True, [50, 30, 10])])
def test_the_best_by_a_metric_stay(highest: bool, expected: list[int]) -> None:
    """Lowest or highest; of equal ones the newer; what has no score does not compete."""
    scores = {10: 3.0, 20: 1.0, 30: 4.0, 40: 0.5}
    checkpoints = [held(s, "scored", metrics={"loss": v}) for s, v in scores.items()]
    checkpoints.append(held(50, metrics={"other": 0.0}))
    policy = RetentionPolicy(last=1, best=2, metric="loss", highest=highest)
    assert kept(choose(checkpoints, policy)) == expected


def test_pinned_and_resumed_from_stay() -> None:
    """Whatever the rules say, also a pinned one that was found damaged."""
    checkpoints = [held(10, "pinned"), held(20), held(30), held(40, "pinned", "corrupt"), held(50)]
    plan = choose(checkpoints, resumed_from="of-20")
    assert kept(plan) == [50, 40, 20, 10]
    assert deleted(plan) == [30]


# --- other branches ---


def went_back(hours: float, attempt: str = "of-10") -> BranchHistory:
    rollback = Rollback(
        generation=1, id=attempt_at(hours), from_step=33, to_step=10, attempt=attempt, reason="x"
    )
    return BranchHistory((rollback,))


def left(step: int, attempt: str = OLD) -> SkippedCheckpoint:
    return SkippedCheckpoint(step=step, reason="left", attempt=attempt, abandoned=True)


def test_an_abandoned_branch_takes_no_ones_place_and_goes_after_a_while() -> None:
    """Not at once, and not where it is pinned; what the run went back to stays."""
    checkpoints = [held(10), held(15), held(20)]
    abandoned = (left(30), left(40, "pinned-one"))
    more = {"abandoned": abandoned, "pinned": frozenset({"pinned-one"})}
    plan = choose(checkpoints, **more, history=went_back(1))
    assert (kept(plan), deleted(plan)) == ([40, 20, 10], [15, 30])
    assert plan.delete[-1].reason == "left"
    plan = choose(checkpoints, **more, history=went_back(99))
    assert (kept(plan), deleted(plan)) == ([40, 20, 10], [15])


# --- attempts without a manifest ---


@pytest.mark.parametrize(
    ("attempt", "is_deleted"),
    [
        (loose(40, OLD), True),
        (loose(5, OLD), True),
        (loose(40, YOUNG), False),  # under way, perhaps another job's
        (loose(40, YOUNG, pruned=True), True),
        (loose(40, OLD, recoverable=True), False),  # the next restore publishes it
        (loose(20, OLD, recoverable=True), True),
        (loose(20, YOUNG, recoverable=True), False),
    ],
)
def test_what_may_become_a_checkpoint_is_left(attempt: LooseAttempt, is_deleted: bool) -> None:
    """Young attempts, and complete ones above the newest checkpoint."""
    plan = choose([held(30)], loose=(attempt,))
    assert [(d.step, d.what) for d in plan.delete] == [(attempt.step, "attempt")] * is_deleted


def test_a_root_without_checkpoints_loses_nothing_that_is_whole() -> None:
    """Torn attempts go; a complete one is all that the run has."""
    plan = choose([], loose=(loose(10, OLD), loose(20, OLD, recoverable=True)))
    assert [(d.step, d.attempt) for d in plan.delete] == [(10, OLD)]


def test_what_is_damaged_or_newer_is_named_and_left() -> None:
    """For a person to decide about."""
    skipped = (
        SkippedCheckpoint(step=7, reason="x"),
        SkippedCheckpoint(step=9, reason="x", newer=True),
    )
    assert choose([held(30)], left_alone=skipped).left_alone == (7, 9)


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.sets(st.sampled_from(["good", "pinned", "corrupt"]))),
        unique_by=lambda pair: pair[0],
    ),
    st.integers(1, 4),
)
def test_the_newest_good_one_is_never_deleted(
    pairs: list[tuple[int, set[MarkKind]]], last: int
) -> None:
    """Nor the newest of all; everything is decided once; and deciding again on what stays changes nothing."""
    checkpoints = [held(step, *kinds) for step, kinds in pairs]
    plan = choose(checkpoints, RetentionPolicy(last=last))
    assert sorted(kept(plan) + deleted(plan)) == sorted(step for step, _ in pairs)
    sound = [step for step, kinds in pairs if "corrupt" not in kinds]
    good = [step for step, kinds in pairs if {"good", "corrupt"} & kinds == {"good"}]
    for steps in (sound, good):
        assert max(steps, default=None) in {*kept(plan), None}
    again = choose(
        [h for h in checkpoints if h.info.step in kept(plan)], RetentionPolicy(last=last)
    )
    assert deleted(again) == []


# --- the pieces ---


def test_an_attempts_id_tells_when_it_began() -> None:
    """Ids of other programs tell nothing, so nothing of theirs is too old."""
    assert begun_at(attempt_at(0)) == START.timestamp()
    for other in ("20261331T093000000000-0123456789ab", "x", "20260131T093000-1b9d6bcd", "latest"):
        assert begun_at(other) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: RetentionPolicy(last=0),
        lambda: RetentionPolicy(every_steps=0),
        lambda: RetentionPolicy(best=-1),
        lambda: RetentionPolicy(best=1),
        lambda: RetentionPolicy(metric="loss"),
        lambda: RetentionPolicy(grace_s=-1.0),
        lambda: RetentionPolicy(grace_s=float("nan")),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(make: Callable[[], object]) -> None:
    """When it is made."""
    with pytest.raises(ValueError, match=r"last|every_steps|metric|grace_s"):
        make()
