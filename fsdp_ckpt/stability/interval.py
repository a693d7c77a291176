"""How often to save: what a save costs against what a failure loses.

saved      work, interval_s     cost   work             cost   work      failure    recovery
├──────────────────────────────┼──────┼────────────────┼──────┼─────────✗ lost     ├─────────┤
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

__all__ = [
    "daly_interval",
    "learned_mtbf",
    "lost_fraction",
    "measured_cost",
    "young_interval",
]

# A run that has not failed yet is expected to do so after a day.
PRIOR_MTBF_S = 86400.0
RECENT_COSTS = 9


def young_interval(cost_s: float, mtbf_s: float) -> float:
    """Return the best time between two saves, to first order: ``sqrt(2 * cost * mtbf)``, in seconds.

    Args:
        cost_s: What a save takes from training, in seconds.
        mtbf_s: Mean time between failures of the whole job, in seconds.

    Raises:
        ValueError: One of them is not above 0.

    Source: Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974.
    """
    _check(cost_s, mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s)


def daly_interval(cost_s: float, mtbf_s: float) -> float:
    """Return the best time between two saves, also where saves are not cheap beside failures, in seconds.

    It is training time: from the end of what a save takes to the beginning of the next one.

    Args:
        cost_s: What a save takes from training, in seconds.
        mtbf_s: Mean time between failures of the whole job, in seconds.

    Raises:
        ValueError: One of them is not above 0.

    Source: Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22(3),
    2006, equation 37.
    """
    _check(cost_s, mtbf_s)
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return young_interval(cost_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def lost_fraction(
    interval_s: float, cost_s: float, mtbf_s: float, recovery_s: float = 0.0
) -> float:
    """Return the expected part of the time that is not training which counts: saves, lost work, recovery.

    Failures come at random, at any time, saves and recoveries included. Of the time between two failures,
    exponential with mean ``mtbf_s``, what counts is ``interval_s`` for every whole cycle after the recovery.

    Args:
        interval_s: Training time between two saves, in seconds.
        cost_s: What a save takes from training, in seconds.
        mtbf_s: Mean time between failures of the whole job, in seconds.
        recovery_s: From a failure to training again; and where saves are written in the background, also
            the time until one is durable, since what it holds is lost until then.

    Returns:
        In [0, 1].

    Raises:
        ValueError: A time is not above 0, or ``recovery_s`` is below it.

    Source: Daly 2006, equation 20, solved for the ratio of solution time to wall-clock time.
    """
    _check(cost_s, mtbf_s)
    if not (interval_s > 0 and recovery_s >= 0):
        raise ValueError(
            f"interval_s must be above 0 and recovery_s not below it, not {interval_s} and {recovery_s}"
        )
    cycle = (interval_s + cost_s) / mtbf_s
    if cycle > 700:  # e ** 700 is about as large as a float gets
        return 1.0
    return 1 - interval_s / mtbf_s * math.exp(-recovery_s / mtbf_s) / math.expm1(cycle)


def learned_mtbf(num_failures: int, uptime_s: float, prior_s: float = PRIOR_MTBF_S) -> float:
    """Return the mean time between failures that a run's own history makes likely, in seconds.

    Args:
        num_failures: How often the run was interrupted.
        uptime_s: How long it has run altogether, in seconds.
        prior_s: What is expected before anything is known, in seconds; weighs as much as one failure.

    Raises:
        ValueError: A negative number, or no prior.

    Source: mean of the failure rate under a gamma prior of shape 1 and rate ``prior_s``; its inverse.
    """
    if num_failures < 0 or not (uptime_s >= 0 and prior_s > 0):
        raise ValueError(
            f"{num_failures} failures in {uptime_s} s, {prior_s} s expected: none may be negative"
        )
    return (prior_s + uptime_s) / (1 + num_failures)


def measured_cost(costs_s: Sequence[float]) -> float:
    """Return what a save takes from training: the median of the last nine measurements, in seconds.

    Args:
        costs_s: One per save, oldest first: how long training stood still, and by how much the steps beside
            the writing were slower altogether.

    Raises:
        ValueError: None was measured.
    """
    if not costs_s:
        raise ValueError("no save was measured yet")
    return median(costs_s[-RECENT_COSTS:])


def _check(cost_s: float, mtbf_s: float) -> None:
    if not (cost_s > 0 and mtbf_s > 0 and math.isfinite(cost_s) and math.isfinite(mtbf_s)):
        raise ValueError(f"cost_s and mtbf_s must be above 0, not {cost_s} and {mtbf_s}")
