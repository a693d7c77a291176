"""When ranks look at things together, and what saves are found to cost."""

from __future__ import annotations

import pytest
import torch

from fsdp_ckpt import MismatchError, Progress, SavePolicy
from fsdp_ckpt.life.stepping import MAX_LOOK_S, MAX_LOOK_STEPS, Stepper, _Pace
from fsdp_ckpt.life.watching import RunWatch
from fsdp_ckpt.ranks.group import RankGroup
from fsdp_ckpt.stability.health import Candidate
from fsdp_ckpt.stability.interval import daly_interval
from fsdp_ckpt.stability.save_costs import SaveCosts
from fsdp_ckpt.stability.spike_policy import SpikePolicy


class Clock:
    """Time that goes by when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class CountingGroup(RankGroup):
    """Two ranks that say the same; counts what they exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.world_size = 2
        self.num_exchanges = 0

    def _exchange(self, value: object, combine: object) -> object:
        self.num_exchanges += 1
        return combine([value, value])  # type: ignore[operator]


def stepper(
    policy: SavePolicy, clock: Clock, spikes: SpikePolicy | None = None
) -> tuple[Stepper, CountingGroup, Progress]:
    group, progress = CountingGroup(), Progress()
    watch = RunWatch(spikes, lambda _: None, clock)
    every = spikes.look_every if spikes else None
    return Stepper(group, progress, policy, None, watch, every), group, progress


def test_rules_that_go_by_steps_exchange_nothing() -> None:
    """Every rank comes to the same by itself: a small step pays for no message."""
    clock = Clock()
    one, group, progress = stepper(SavePolicy(every_steps=10, on_signal=False), clock)
    due = []
    for _ in range(30):
        progress.advance()
        if one.decide(None, None).save:
            due.append(progress.step)
    assert (due, group.num_exchanges) == ([10, 20, 30], 0)


def test_signals_and_clocks_are_looked_at_about_once_a_second() -> None:
    """The coordinator says when the next look is, from how long steps take; 64 steps are the most."""
    for step_s, num_steps in ((0.1, 10), (0.001, MAX_LOOK_STEPS), (3.0, 1)):
        pace = _Pace(clock := Clock())
        assert pace.num_steps(1) == 1
        clock.now += step_s
        assert pace.num_steps(2) == num_steps


def test_a_dear_exchange_is_made_rarely() -> None:
    """It takes a hundredth of the time, but a signal never waits for more than ten seconds."""
    for cost_s, expected_s in ((0.05, 5.0), (2.0, MAX_LOOK_S)):
        pace = _Pace(clock := Clock())

        def exchange(cost_s: float = cost_s, clock: Clock = clock) -> dict[str, object]:
            clock.now += cost_s
            return {}

        pace.timed(exchange)
        pace.num_steps(1)
        clock.now += 1.0
        assert pace.num_steps(2) == expected_s


def test_minutes_are_those_of_the_coordinator() -> None:
    """A save is due at the first look after them."""
    clock = Clock()
    one, group, progress = stepper(SavePolicy(every_minutes=1.0, on_signal=False), clock)
    due = []
    for _ in range(200):
        progress.advance()
        clock.now += 0.5
        if one.decide(None, None).save == "minutes":
            due.append(progress.step)
            one.saved_step = progress.step
            one._watch.saved(clock.now)
    assert due == [120]
    assert group.num_exchanges == 101


def test_every_look_judges_every_step() -> None:
    """Losses since the last look are judged in order, however they were given."""
    clock = Clock()
    spikes = SpikePolicy(look_every=3, patience=1, warmup=4, window=8)
    one, group, progress = stepper(SavePolicy(on_signal=False), clock, spikes)
    found = []
    loss = torch.zeros((), requires_grad=True)
    for step in range(1, 10):
        progress.advance()
        value = loss * 0 + (float("nan") if step == 5 else 1.0)
        found.append(one.decide(value, torch.tensor(2.0)).spike)
        with torch.no_grad():
            loss += 1  # what was given is not what is there now
    assert group.num_exchanges == 3
    assert [n for n, spike in enumerate(found, 1) if spike] == [6]
    assert found[5] is not None
    assert (found[5].step, found[5].skip_steps, found[5].ranks) == (5, (5, 6), (0, 1))


def test_what_is_no_number_is_refused() -> None:
    """On all ranks, before anything is decided."""
    one, _, progress = stepper(SavePolicy(on_signal=False), Clock(), SpikePolicy())
    progress.advance()
    with pytest.raises(MismatchError, match="no loss on rank 0"):
        one.decide(None, None)
    with pytest.raises(MismatchError, match="no single number"):
        one.decide(torch.ones(2), None)


def test_a_save_costs_its_stall_and_the_slower_steps_beside_it() -> None:
    """Beside the median of quiet steps; until it is durable."""
    costs = SaveCosts()
    assert costs.cost_s is None
    for seconds in (1.0, 1.1, 0.9, 9.0, 1.0):
        costs.step(seconds)
    costs.begin(50.0, stall_s=2.0)
    for seconds in (1.5, 1.25, 0.5):
        costs.step(seconds)
    assert costs.cost_s is None
    costs.end(53.25)
    assert costs.cost_s == pytest.approx(2.75)
    assert costs.persist_s == pytest.approx(3.25)
    costs.step(5.0)
    costs.end(99.0)
    assert costs.cost_s == pytest.approx(2.75)


def test_the_automatic_interval_is_dalys_of_what_was_measured() -> None:
    """From the measured cost, and the mean time between failures that the run's own history tells."""
    clock = Clock()
    policy = SavePolicy(auto=True, on_signal=False)
    watch = RunWatch(None, lambda _: None, clock)
    assert watch.interval_s(policy) is None
    facts = {"uptime_s": 9 * 86400.0, "interruptions": 8, "ended": False}
    watch.remember(facts, is_new_life=True)
    for _ in range(8):
        clock.now += 1.0
        watch.stepped()
    begun = watch.now_s()
    clock.now += 3.0
    watch.saved(begun)
    clock.now += 1.0
    watch.stepped()
    watch.durable()
    # One more interruption than was saved, in ten days with the prior's and 12 s of this life.
    expected = daly_interval(3.0, (86400.0 + 9 * 86400.0 + 12.0) / 10)
    assert watch.interval_s(policy) == pytest.approx(expected)
    assert watch.facts(is_last=True) == {
        "uptime_s": pytest.approx(9 * 86400.0 + 12.0),
        "interruptions": 9,
        "ended": True,
    }


def test_a_run_that_ended_by_itself_was_not_interrupted() -> None:
    """What a checkpoint says of its end counts; facts of another kind are no harm."""
    watch = RunWatch(SpikePolicy(), lambda _: None, Clock())
    watch.remember({"uptime_s": 5.0, "interruptions": 2, "ended": True}, is_new_life=True)
    assert watch.facts(is_last=False)["interruptions"] == 2
    assert watch.remember({"detector": {"windows": 3}, "uptime_s": "x"}, is_new_life=True)
    assert watch.facts(is_last=False)["interruptions"] == 1


def test_checkpoints_become_good_by_what_all_ranks_say() -> None:
    """One rank's bad step starts the count anew; those beyond a rollback are forgotten."""
    good: list[Candidate] = []
    watch = RunWatch(SpikePolicy(healthy_steps=2, patience=9), good.append, Clock())
    watch.add_candidate(1, "a")
    for step in range(2, 40):
        watch.judge(step, [1.0, 50.0 if step == 35 else 1.0], [None, None])
        if step == 34:
            watch.add_candidate(34, "b")
            watch.add_candidate(36, "c")
    assert [(c.step, c.attempt) for c in good] == [(1, "a"), (34, "b"), (36, "c")]
    watch.gone_back(34)
    assert watch.good == {"a": 1, "b": 34}
