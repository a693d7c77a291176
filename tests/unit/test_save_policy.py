"""When to save is one decision for all ranks, from facts alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from fsdp_ckpt.errors import MismatchError
from fsdp_ckpt.stability.interval import daly_interval
from fsdp_ckpt.stability.save_policy import SavePolicy, StepFacts, merge_facts


def due(policy: SavePolicy, step: int, **facts: object) -> str | None:
    return policy.due(StepFacts(step=step, **{"previous_step": step - 1, **facts}))  # type: ignore[arg-type]


def test_every_nth_step() -> None:
    """Counted from the run's first step, so that a resumed run saves at the same ones."""
    policy = SavePolicy(every_steps=10)
    assert [s for s in range(1, 40) if due(policy, s)] == [10, 20, 30]
    assert due(policy, 23, previous_step=19) == "steps"  # several steps reported at once
    assert due(policy, 29, previous_step=20) is None


def test_every_so_many_minutes() -> None:
    """Since the last save, by the coordinator's clock."""
    policy = SavePolicy(every_minutes=30)
    assert due(policy, 5, since_save_s=1799.9) is None
    assert due(policy, 5, since_save_s=1800.0) == "minutes"


def test_epoch_ends_and_the_last_step() -> None:
    """Once each; the last step also where it is jumped over."""
    policy = SavePolicy(epoch_ends=True, last_step=100)
    assert due(policy, 50, epoch=1, previous_epoch=0) == "epoch end"
    assert due(policy, 51, epoch=1, previous_epoch=1) is None
    assert due(policy, 100) == "last step"
    assert due(policy, 102, previous_step=98) == "last step"
    assert due(policy, 101) is None


def test_a_signal_comes_first_and_only_where_it_is_wanted() -> None:
    """Also at a step that is due anyway."""
    assert due(SavePolicy(every_steps=10), 10, has_signal=True) == "signal"
    assert due(SavePolicy(every_steps=10, on_signal=False), 11, has_signal=True) is None


def test_a_step_that_is_saved_is_not_saved_again() -> None:
    """Whatever the reason: a signal finds the checkpoint there, a restore begins at one."""
    policy = SavePolicy(every_steps=10, every_minutes=1, epoch_ends=True, auto=True)
    facts = {"saved_step": 10, "has_signal": True, "since_save_s": 1e9, "epoch": 1}
    assert due(policy, 10, **facts) is None
    assert due(policy, 11, **facts) == "signal"


def test_automatically() -> None:
    """At Daly's interval, by its own mean time between failures or the learned one; before, once a minute."""
    policy = SavePolicy(auto=True, mtbf_s=10800.0)
    interval_s = policy.interval_s(6.0, mtbf_s=1.0)
    assert interval_s == daly_interval(6.0, 10800.0)
    facts = StepFacts(step=7, since_save_s=355.0)
    assert policy.due(facts, interval_s) is None
    assert policy.due(dataclasses.replace(facts, since_save_s=357.0), interval_s) == "auto"
    assert policy.interval_s(None, mtbf_s=1.0) is None
    assert [due(policy, 7, since_save_s=s) for s in (59.0, 60.0)] == [None, "auto"]
    learning = SavePolicy(auto=True)
    assert learning.interval_s(6.0, mtbf_s=86400.0) == daly_interval(6.0, 86400.0)
    assert learning.interval_s(0.0, mtbf_s=86400.0) == daly_interval(1e-3, 86400.0)
    # No save begins before the last one is durable.
    assert learning.interval_s(6.0, mtbf_s=10800.0, persist_s=900.0) == 900.0
    assert SavePolicy(every_steps=5).interval_s(6.0, mtbf_s=10800.0) is None


def test_no_rule_saves_nothing() -> None:
    """A policy of nothing leaves it to the caller."""
    policy = SavePolicy(on_signal=False)
    assert due(policy, 10, since_save_s=1e9, epoch=1) is None
    assert not policy.needs_exchange


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (SavePolicy(every_steps=5, on_signal=False), False),
        (SavePolicy(epoch_ends=True, last_step=9, on_signal=False), False),
        (SavePolicy(every_steps=5), True),
        (SavePolicy(every_minutes=5, on_signal=False), True),
        (SavePolicy(auto=True, on_signal=False), True),
    ],
)
def test_ranks_talk_only_about_what_they_cannot_know(policy: SavePolicy, expected: bool) -> None:
    """Steps and epochs are the same everywhere; clocks and signals are not."""
    assert policy.needs_exchange is expected


def test_one_ranks_signal_is_all_ranks_and_one_clock_counts() -> None:
    """Whichever rank it was, and whatever the other clocks say."""
    policy = SavePolicy(every_minutes=1)
    for told in range(3):
        facts = [
            StepFacts(step=7, since_save_s=10.0 + 100.0 * rank, has_signal=rank == told)
            for rank in range(3)
        ]
        merged = merge_facts(facts)
        assert (merged.since_save_s, merged.has_signal) == (10.0, True)
        assert policy.due(merged) == "signal"
    quiet = [dataclasses.replace(f, has_signal=False) for f in facts]
    assert policy.due(merge_facts(quiet)) is None
    assert policy.due(merge_facts(quiet[::-1])) == "minutes"


def test_ranks_at_different_steps_are_told() -> None:
    """No rank waits for a save that another one never begins."""
    with pytest.raises(MismatchError, match="rank 1 at step 8") as caught:
        merge_facts([StepFacts(step=7), StepFacts(step=8)])
    assert caught.value.rank == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: SavePolicy(every_steps=0),
        lambda: SavePolicy(last_step=0),
        lambda: SavePolicy(every_minutes=0.0),
        lambda: SavePolicy(every_minutes=float("nan")),
        lambda: SavePolicy(auto=True, mtbf_s=-1.0),
        lambda: SavePolicy(mtbf_s=10.0),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(make: Callable[[], object]) -> None:
    """When it is made."""
    with pytest.raises(ValueError, match=r"every_|last_step|mtbf_s"):
        make()
