"""Simulate a job that fails at random: time lost against the interval between saves, as a picture.

    python scripts/simulate_failures.py lost.png --mtbf-s 10800 --sync-cost-s 45 --async-cost-s 6 \\
        --persist-s 40 --restart-s 120

Failures are a Poisson process. After each the job restarts, reads its newest durable checkpoint and trains
on; what it had done since that checkpoint's snapshot is lost. The costs are what was measured of a save in
each mode: by how much it delays training. A save in the background is durable only ``--persist-s`` later.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fsdp_ckpt.stability.interval import daly_interval, lost_fraction, young_interval

CHUNK = 250_000
FACTORS = np.geomspace(0.1, 10.0, 61)

Times = npt.NDArray[np.float64]


def draw_gaps(mtbf_s: float, num_failures: int, seed: int) -> Times:
    """Return the times between failures, in seconds, shape (num_failures,)."""
    return np.random.default_rng(seed).exponential(mtbf_s, num_failures)


def simulate(
    gaps_s: Times, intervals_s: Times, cost_s: float, restart_s: float = 0.0, persist_s: float = 0.0
) -> Times:
    """Live through a run once per interval, always with the same failures.

    Args:
        gaps_s: Times between failures, in seconds.
        intervals_s: Training time between two saves, in seconds, shape (num_intervals,).
        cost_s: What a save takes from training, in seconds.
        restart_s: From a failure to training again, in seconds; may be cut short by the next failure.
        persist_s: From the end of that to the checkpoint being durable, in seconds.

    Returns:
        The part of the time that was lost, shape (num_intervals,).
    """
    kept = np.zeros(len(intervals_s))
    for start in range(0, len(gaps_s), CHUNK):
        # A cycle counts once its save is durable, which is persist_s after its end.
        durable_s = np.maximum(gaps_s[start : start + CHUNK] - restart_s - persist_s, 0.0)
        for i, interval_s in enumerate(intervals_s):
            kept[i] += np.floor(durable_s / (interval_s + cost_s)).sum() * interval_s
    return 1 - kept / gaps_s.sum()


def best_by_brute_force(
    gaps_s: Times, cost_s: float, mtbf_s: float, restart_s: float = 0.0, persist_s: float = 0.0
) -> float:
    """Return the interval that loses least in the simulation, from a grid with steps of 1 %."""
    grid = young_interval(cost_s, mtbf_s) * 1.01 ** np.arange(-45.0, 25.0)
    return float(grid[np.argmin(simulate(gaps_s, grid, cost_s, restart_s, persist_s))])


def main() -> None:
    """Simulate, print what was found as JSON, and draw."""
    parser = argparse.ArgumentParser(description="time lost against the interval between saves")
    parser.add_argument("out", type=Path, help="PNG file")
    parser.add_argument("--mtbf-s", type=float, default=10800.0, help="of the whole job (10800)")
    parser.add_argument("--sync-cost-s", type=float, default=45.0, help="a synchronous save (45)")
    parser.add_argument("--async-cost-s", type=float, default=6.0, help="stall and slowdown (6)")
    parser.add_argument("--persist-s", type=float, default=40.0, help="in the background (40)")
    parser.add_argument("--restart-s", type=float, default=120.0, help="after a failure (120)")
    parser.add_argument("--every-s", type=float, default=1800.0, help="a fixed choice (1800)")
    parser.add_argument("--failures", type=int, default=500_000, help="simulated (500000)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    gaps_s = draw_gaps(args.mtbf_s, args.failures, args.seed)
    modes = {
        "sync": (args.sync_cost_s, 0.0),
        "async": (args.async_cost_s, args.persist_s),
    }
    found = {}
    for mode, (cost_s, persist_s) in modes.items():
        auto_s = max(daly_interval(cost_s, args.mtbf_s), persist_s)
        curve_s = auto_s * FACTORS
        points_s = np.array([auto_s, args.every_s])
        lost = simulate(gaps_s, points_s, cost_s, args.restart_s, persist_s)
        found[mode] = {
            "cost_s": cost_s,
            "auto_s": auto_s,
            "lost_at_auto": lost[0],
            "lost_at_fixed": lost[1],
            "expected_at_auto": lost_fraction(
                auto_s, cost_s, args.mtbf_s, args.restart_s + persist_s
            ),
            "best_s": best_by_brute_force(gaps_s, cost_s, args.mtbf_s, args.restart_s, persist_s),
            "curve_s": curve_s.tolist(),
            "curve": simulate(gaps_s, curve_s, cost_s, args.restart_s, persist_s).tolist(),
        }
    draw(args.out, found, args.every_s, args.mtbf_s)
    shown = {m: {k: v for k, v in f.items() if "curve" not in k} for m, f in found.items()}
    print(json.dumps(shown, indent=2))


def draw(out: Path, found: dict[str, dict[str, object]], every_s: float, mtbf_s: float) -> None:
    """Draw the curve of each mode with what auto and the fixed choice lose on it."""
    import matplotlib

    matplotlib.use("Agg")  # no display
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5))
    for (mode, its), color in zip(found.items(), ("tab:orange", "tab:blue"), strict=True):
        label = f"{mode}, {its['cost_s']:g} s a save"
        axes.plot(its["curve_s"], its["curve"], color=color, label=label)
        axes.plot(its["auto_s"], its["lost_at_auto"], "o", color=color, label=f"auto, {mode}")
        axes.plot(every_s, its["lost_at_fixed"], "s", color=color, mfc="none")
    axes.axvline(every_s, color="gray", lw=0.8, ls=":", label=f"every {every_s:g} s")
    axes.set(
        xscale="log",
        xlabel="training time between two saves (s)",
        ylabel="part of the time lost",
        title=f"a failure every {mtbf_s:g} s",
        ylim=(0, 0.5),
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out, dpi=120, bbox_inches="tight")
    plt.close(figure)


if __name__ == "__main__":
    main()
