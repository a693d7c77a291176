"""The interval between saves loses the least time, by arithmetic and in a simulated run."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_ckpt.stability.interval import (
    daly_interval,
    learned_mtbf,
    lost_fraction,
    measured_cost,
    young_interval,
)
from scripts.simulate_failures import best_by_brute_force, draw_gaps, simulate

HOUR = 3600.0


def test_to_first_order_it_is_a_square_root() -> None:
    """Six seconds a save and a failure every three hours: six minutes."""
    assert young_interval(6.0, 3 * HOUR) == 360.0
    assert daly_interval(6.0, 3 * HOUR) == pytest.approx(356.0, abs=0.1)
    # Saves that cost more than failures lose: once per failure.
    assert daly_interval(2 * HOUR, HOUR) == HOUR


@pytest.mark.parametrize("cost_s", [0.1, 6.0, 60.0, 600.0])
@pytest.mark.parametrize("mtbf_s", [2 * HOUR, 24 * HOUR])
@pytest.mark.parametrize("recovery_s", [0.0, 300.0])
def test_it_is_within_5_percent_of_the_best(
    cost_s: float, mtbf_s: float, recovery_s: float
) -> None:
    """Of all intervals in steps of 0.1 %, by the exact expectation."""
    grid = young_interval(cost_s, mtbf_s) * 1.001 ** np.arange(-1000.0, 1000.0)
    best = min(grid, key=lambda i: lost_fraction(float(i), cost_s, mtbf_s, recovery_s))
    assert daly_interval(cost_s, mtbf_s) == pytest.approx(best, rel=0.05)


@pytest.mark.parametrize(
    ("cost_s", "mtbf_s", "restart_s", "persist_s"),
    [(6.0, 3 * HOUR, 120.0, 40.0), (45.0, 3 * HOUR, 120.0, 0.0), (300.0, HOUR, 600.0, 0.0)],
)
def test_it_is_within_5_percent_of_the_best_that_a_simulation_finds(
    cost_s: float, mtbf_s: float, restart_s: float, persist_s: float
) -> None:
    """Among failures of a Poisson process, by brute force; and what it loses there is what was expected."""
    gaps_s = draw_gaps(mtbf_s, 1_000_000, seed=1)
    best_s = best_by_brute_force(gaps_s, cost_s, mtbf_s, restart_s, persist_s)
    interval_s = daly_interval(cost_s, mtbf_s)
    assert interval_s == pytest.approx(best_s, rel=0.05)
    (lost,) = simulate(gaps_s, np.array([interval_s]), cost_s, restart_s, persist_s)
    expected = lost_fraction(interval_s, cost_s, mtbf_s, restart_s + persist_s)
    assert lost == pytest.approx(expected, rel=0.005)


@given(st.floats(1e-3, 1e6), st.floats(1e-3, 1e6), st.floats(1e-3, 1e9), st.floats(0, 1e9))
def test_what_is_lost_is_a_part(
    interval_s: float, cost_s: float, mtbf_s: float, recovery_s: float
) -> None:
    """In [0, 1] for any times; more where recovery takes longer or failures come more often."""
    lost = lost_fraction(interval_s, cost_s, mtbf_s, recovery_s)
    assert 0 <= lost <= 1
    assert lost_fraction(interval_s, cost_s, mtbf_s, recovery_s + 1) >= lost
    assert lost_fraction(interval_s, cost_s, mtbf_s * 2, recovery_s) <= lost + 1e-12


def test_the_first_order_of_the_loss() -> None:
    """Where failures are rare, it is the cost per interval and half an interval per failure."""
    cost_s, mtbf_s, interval_s = 1.0, 1e6, 1000.0
    first = cost_s / interval_s + interval_s / (2 * mtbf_s)
    assert lost_fraction(interval_s, cost_s, mtbf_s) == pytest.approx(first, rel=0.01)


def test_a_run_learns_how_often_it_fails() -> None:
    """From a prior of a day to what happened; a run that never failed grows confident slowly."""
    assert learned_mtbf(0, 0.0) == 24 * HOUR
    assert learned_mtbf(0, 24 * HOUR) == 48 * HOUR
    assert learned_mtbf(419, 54 * 24 * HOUR) == pytest.approx(3.1 * HOUR, rel=0.02)


def test_the_cost_is_the_usual_one_lately() -> None:
    """One slow save does not change the interval; a lasting change does."""
    assert measured_cost([6.0, 6.0, 90.0]) == 6.0
    assert measured_cost([6.0] * 20 + [2.0] * 9) == 2.0


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_times_that_make_no_sense_are_refused(bad: float) -> None:
    """By each function, whichever argument it is."""
    for function in (young_interval, daly_interval):
        for arguments in ((bad, 1.0), (1.0, bad)):
            with pytest.raises(ValueError, match="above 0"):
                function(*arguments)
    if bad <= 0 or math.isnan(bad):
        with pytest.raises(ValueError, match="above 0"):
            lost_fraction(bad, 1.0, 1.0)
        with pytest.raises(ValueError, match="negative"):
            learned_mtbf(1, -1.0, 1.0)
    with pytest.raises(ValueError, match="measured"):
        measured_cost([])
