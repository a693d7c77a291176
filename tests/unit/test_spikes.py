"""A spike is found soon, on whichever rank it is, and what goes well is left alone."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_ckpt.errors import MismatchError
from fsdp_ckpt.stability.health import Candidate, Candidates
from fsdp_ckpt.stability.robust_window import RobustWindow
from fsdp_ckpt.stability.spike_detector import SpikeDetector
from fsdp_ckpt.stability.spike_policy import SpikeDecision, SpikePolicy
from scripts.tabulate_spikes import Outcome, judge, read_curves

CURVES = read_curves(Path(__file__).parents[1] / "curves")
AT_ONCE = SpikePolicy(warmup=10, patience=1)


def warmed(policy: SpikePolicy = AT_ONCE, num_ranks: int = 4, steps: int = 20) -> SpikeDetector:
    """Return a detector that has seen a run go well."""
    detector, draw = SpikeDetector(policy), random.Random(0)
    for step in range(1, steps + 1):
        losses = [2.0 + draw.gauss(0, 0.05) for _ in range(num_ranks)]
        norms = [math.exp(draw.gauss(0, 0.1))] * num_ranks
        assert detector.observe(step, losses, norms).is_healthy
    return detector


# --- recorded runs ---


@pytest.mark.parametrize("name", ["clean", "noisy", "slow_drift", "cosine_restarts"])
def test_no_false_alarm_in_a_run_that_goes_well(name: str) -> None:
    """Smooth or noisy, with a drifting loss or restarts of the learning rate: no spike."""
    (curve,) = CURVES[name]
    outcome = judge(curve, SpikePolicy())
    assert (outcome.num_false, outcome.num_steps) == (0, 600)
    assert outcome.num_suspicious <= 5


@pytest.mark.parametrize(
    ("name", "most"),
    [("nan", 0), ("poisoned_rank", 2), ("divergence", 5), ("slow_divergence", 100)],
)
def test_what_goes_wrong_is_found_soon(name: str, most: int) -> None:
    """With no alarm before; patience costs two steps."""
    (curve,) = CURVES[name]
    outcome = judge(curve, SpikePolicy())
    assert (outcome.num_false, outcome.num_suspicious) == (0, 0)
    assert outcome.delay is not None
    assert outcome.delay <= most


def test_a_single_outlier_is_no_spike() -> None:
    """It is suspicious, and then the run goes on; without patience it is a spike at once."""
    (curve,) = CURVES["single_outlier"]
    assert judge(curve, SpikePolicy()) == Outcome(
        num_steps=600, num_suspicious=0, num_false=0, delay=None
    )
    assert judge(curve, SpikePolicy(patience=1)).delay == 0


# --- what counts ---


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["loss", "norm"])
def test_what_is_no_number_is_a_spike_at_once(bad: float, where: str) -> None:
    """On any rank, in the first step too, whatever the patience; the rank is named."""
    for detector in (SpikeDetector(SpikePolicy()), warmed(SpikePolicy(warmup=10))):
        losses, norms = [2.0] * 4, [1.0] * 4
        (losses if where == "loss" else norms)[2] = bad
        decision = detector.observe(21, losses, norms)
        assert (decision.action, decision.ranks) == ("roll_back", (2,))
        assert "step 21" in decision.reason
        assert "rank 2" in decision.reason


def test_one_ranks_spike_is_seen_among_many() -> None:
    """The mean of 4096 ranks hardly moves; the highest loss does, and tells the rank."""
    detector = warmed(num_ranks=4096)
    losses = [2.0] * 4096
    losses[1234] = 6.0
    decision = detector.observe(21, losses, [1.0] * 4096)
    assert (decision.action, decision.ranks) == ("roll_back", (1234,))
    assert "highest loss 6" in decision.reason


def test_a_gradient_norm_is_judged_by_factors() -> None:
    """Twice the usual is none, twenty times is; no norms at all is fine."""
    assert warmed().observe(21, [2.0] * 4, [2.0] * 4).is_healthy
    decision = warmed().observe(21, [2.0] * 4, [1.0, 20.0, 1.0, 1.0])
    assert (decision.action, decision.ranks) == ("roll_back", (1,))
    assert "gradient norm 20" in decision.reason
    assert warmed().observe(21, [2.0] * 4).is_healthy
    assert warmed().observe(21, [2.0] * 4, [0.0] * 4).is_healthy


def test_a_falling_loss_is_never_a_spike() -> None:
    """However fast it falls."""
    detector = SpikeDetector(AT_ONCE)
    for step in range(1, 200):
        assert detector.observe(step, [10.0 * 0.8**step]).is_healthy


def test_a_flat_curve_may_move_a_little() -> None:
    """Without noise, the least deviation is a part of the loss itself."""
    detector = SpikeDetector(AT_ONCE)
    for step in range(1, 50):
        assert detector.observe(step, [2.0]).is_healthy
    assert detector.observe(50, [2.2]).is_healthy
    assert not detector.observe(51, [2.3]).is_healthy


def test_losses_as_large_as_floats_get_break_nothing() -> None:
    """The mean of them is finite too."""
    decision = warmed().observe(21, [1.7e308] * 4, [1e-320] * 4)
    assert decision.action == "roll_back"


def test_nothing_is_judged_before_the_warmup() -> None:
    """The first steps of a run are wild."""
    detector = SpikeDetector(SpikePolicy(warmup=10, patience=1))
    for step in range(1, 11):
        assert detector.observe(step, [100.0 if step % 5 == 0 else 2.0]).is_healthy
    assert not detector.observe(11, [100.0]).is_healthy


# --- what is decided ---


def actions(policy: SpikePolicy, losses: Sequence[float]) -> list[str]:
    detector = warmed(policy)
    return [detector.observe(21 + i, [loss] * 4).action for i, loss in enumerate(losses)]


def test_patience_tells_an_outlier_from_a_spike() -> None:
    """So many suspicious steps in a row, counted anew after each healthy one."""
    policy = SpikePolicy(warmup=10, patience=3, on_outlier="skip_update")
    skip = "skip_update"
    assert actions(policy, [9.0, 9.0, 2.0, 9.0, 9.0, 9.0]) == [
        skip, skip, "none", skip, skip, "roll_back",
    ]  # fmt: skip


def test_the_data_around_a_spike_is_told_in_steps() -> None:
    """From the first suspicious step to the last, and as much around it as the policy says."""
    policy = SpikePolicy(warmup=10, patience=2, skip_before=1, skip_after=3)
    detector = warmed(policy)
    detector.observe(21, [9.0] * 4)
    decision = detector.observe(22, [9.0] * 4)
    assert decision.skip_steps == (20, 26)
    plain = warmed().observe(21, [9.0] * 4)
    assert plain.skip_steps == (21, 22)


def test_lowering_the_learning_rate_is_data() -> None:
    """The decision says by how much and for how long; then what is usual is learned anew."""
    policy = SpikePolicy(warmup=10, patience=1, on_spike="lower_lr", lr_factor=0.5, lr_steps=100)
    detector = warmed(policy)
    decision = detector.observe(21, [9.0] * 4)
    assert (decision.action, decision.lr_factor, decision.lr_steps) == ("lower_lr", 0.5, 100)
    assert detector.observe(22, [9.0] * 4).is_healthy
    stop = warmed(SpikePolicy(warmup=10, patience=1, on_spike="stop", lr_factor=0.5))
    assert stop.observe(21, [9.0] * 4).lr_factor == 1.0


def test_after_the_last_rollback_the_run_is_stopped() -> None:
    """With a reason that says why; until then it goes back."""
    policy = SpikePolicy(warmup=10, patience=1, max_rollbacks=2)
    decisions = [warmed(policy).observe(21, [9.0] * 4, num_rollbacks=n) for n in range(3)]
    assert [d.action for d in decisions] == ["roll_back", "roll_back", "stop"]
    assert "gone back 2 times" in decisions[2].reason
    assert "mean loss 9" in decisions[2].reason


def test_what_was_suspicious_never_becomes_usual() -> None:
    """However long it lasts, the level before stays the measure."""
    policy = SpikePolicy(warmup=10, patience=5)
    found = actions(policy, [9.0] * 200)
    assert found == ["none", "none", "none", "none", "roll_back"] * 40


@pytest.mark.parametrize(("losses", "norms"), [([], []), ([1.0, 2.0], [1.0])])
def test_values_that_do_not_fit_are_an_error(
    losses: Sequence[float], norms: Sequence[float]
) -> None:
    """One of each per rank."""
    with pytest.raises(MismatchError, match="per rank"):
        SpikeDetector(SpikePolicy()).observe(1, losses, norms)


# --- the state ---


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=60), st.integers(0, 59))
def test_a_resumed_detector_decides_as_the_one_before(losses: list[float], cut: int) -> None:
    """Through JSON, at any step: the rest of the run is judged the same."""
    policy = SpikePolicy(window=16, warmup=4, patience=2)

    def run(detector: SpikeDetector, start: int, stop: int) -> list[SpikeDecision]:
        return [detector.observe(s, [losses[s], 0.0]) for s in range(start, stop)]

    cut = min(cut, len(losses))
    whole = SpikeDetector(policy)
    first = SpikeDetector(policy)
    expected = run(whole, 0, len(losses))
    before = run(first, 0, cut)
    resumed = SpikeDetector(policy)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert before + run(resumed, cut, len(losses)) == expected


def test_a_state_of_a_longer_window_keeps_its_newest_values() -> None:
    """A policy may change between two runs."""
    state = warmed(steps=100).state_dict()
    short = SpikeDetector(SpikePolicy(window=16, warmup=10, patience=1))
    short.load_state_dict(state)
    kept = short.state_dict()["windows"]["mean loss"]
    assert kept == state["windows"]["mean loss"][-16:]


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.pop("windows"),
        lambda s: s["windows"].pop("mean loss"),
        lambda s: s["windows"].update({"mean loss": 7}),
        lambda s: s["windows"].update({"mean loss": ["x"]}),
        lambda s: s["windows"].update({"mean loss": [math.nan]}),
        lambda s: s.update(num_suspicious=-1),
        lambda s: s.update(num_suspicious=None),
    ],
)
def test_a_state_that_is_none_is_refused(change: Callable[[dict[str, object]], object]) -> None:
    """As a whole: nothing has changed."""
    detector = warmed()
    before, state = detector.state_dict(), warmed(steps=30).state_dict()
    change(state)
    with pytest.raises(MismatchError, match=r"does not load|holds"):
        detector.load_state_dict(state)
    assert detector.state_dict() == before


# --- the pieces ---


def test_a_window_is_not_moved_by_outliers() -> None:
    """A third of the values may be anything."""
    draw = random.Random(1)
    usual = [draw.gauss(2.0, 0.1) for _ in range(400)]
    wild = [1e6 if i % 3 == 0 else v for i, v in enumerate(usual)]
    clean, dirty = RobustWindow(400, usual), RobustWindow(400, wild)
    assert clean.deviation(2.5, 0.0) == pytest.approx(5.0, rel=0.15)
    assert dirty.center == pytest.approx(2.05, abs=0.06)
    assert dirty.deviation(2.5, 0.0) > 1.5


def test_an_empty_or_flat_window_has_a_deviation() -> None:
    """None where nothing is known; without any spread and floor, all or nothing."""
    assert RobustWindow(4).deviation(7.0, 0.1) == 0.0
    flat = RobustWindow(4, [2.0] * 4)
    assert [flat.deviation(v, 0.0) for v in (1.0, 2.0, 3.0)] == [0.0, 0.0, math.inf]
    assert math.isnan(RobustWindow(4).center)


def test_a_checkpoint_is_good_after_healthy_steps_in_a_row() -> None:
    """Its own step does not count, a suspicious one starts anew; each is told once, the oldest first."""
    candidates = Candidates(3)
    ten, twelve = Candidate(10, "a"), Candidate(12, "b")
    candidates.add(ten)
    told = []
    healthy = {10: True, 11: True, 12: False, 13: True, 14: True, 15: True}
    for step, is_healthy in healthy.items():
        if step == 12:
            candidates.add(twelve)
        told.append(candidates.observe(step, is_healthy=is_healthy))
    assert told == [[], [], [], [], [], [ten, twelve]]
    assert candidates.observe(16, is_healthy=True) == []


def test_what_a_run_goes_back_behind_is_no_candidate() -> None:
    """It never becomes good; what it goes back to may."""
    candidates = Candidates(1)
    for step in (10, 20, 30):
        candidates.add(Candidate(step, str(step)))
    candidates.drop_after(20)
    assert [c.step for c in candidates.observe(31, is_healthy=True)] == [10, 20]


@pytest.mark.parametrize(
    "options",
    [
        {"window": 0}, {"warmup": 0}, {"warmup": 200}, {"patience": 0}, {"loss_sigmas": 0.0},
        {"grad_sigmas": math.nan}, {"min_loss_sigma": 0.0}, {"min_grad_sigma": -1.0}, {"lr_factor": 0.0},
        {"lr_factor": 1.1},
        {"lr_steps": -1}, {"max_rollbacks": -1}, {"on_spike": "pray"}, {"on_outlier": "roll_back"},
        {"healthy_steps": 0}, {"skip_before": -1},
    ],
)  # fmt: skip
def test_a_policy_that_makes_no_sense_is_refused(options: dict[str, object]) -> None:
    """When it is made, by name."""
    with pytest.raises(ValueError, match=f"{next(iter(options))}|actions"):
        SpikePolicy(**options)  # type: ignore[arg-type]
