"""The picture of the demo: losses over steps, with saves, crash, resumes and rollback."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

__all__ = ["draw_runs"]

NAMES = ("uninterrupted", "killed", "resumed on 4 ranks", "resumed on 2 ranks")


def draw_runs(
    path: Path,
    logs: Sequence[Sequence[dict[str, Any]]],
    poisoned: Sequence[dict[str, Any]],
    *,
    kill_at: int,
) -> None:
    """Draw all runs of the demo.

    Args:
        path: Of the PNG.
        logs: Events of the uninterrupted run, of the one that was killed, and of its resumes.
        poisoned: Events of the run that went back.
        kill_at: Step in which the second one was killed.
    """
    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(9, 7), sharex=True)
    for name, log in zip(NAMES, logs, strict=True):
        is_first = log is logs[0]
        style = {"color": "0.8", "linewidth": 6} if is_first else {"marker": "."}
        upper.plot(*_losses(log), label=name, **style)
    upper.axvline(kill_at, color="tab:red", linestyle=":", label="SIGKILL")
    upper.set_title("a crash, and resumes on as many and on fewer ranks")
    _mark_saves(upper, [event for log in logs[1:] for event in log])
    _draw_rollback(lower, poisoned)
    _mark_saves(lower, poisoned)
    lower.set_title("noise in the data of one rank")
    lower.set_xlabel("step")
    for axes in (upper, lower):
        axes.set_ylabel("loss")
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _draw_rollback(axes: Axes, log: Sequence[dict[str, Any]]) -> None:
    backs = [n for n, event in enumerate(log) if event["event"] == "rolled back"]
    cut = backs[0] if backs else len(log)
    axes.plot(*_losses(log[:cut]), marker=".", color="tab:orange", label="before the rollback")
    axes.plot(*_losses(log[cut:]), marker=".", color="tab:blue", label="after it")
    for n in backs:
        loss = _losses(log[:n])[1][-1]
        axes.annotate(
            "rollback",
            xy=(log[n]["to_step"], loss),
            xytext=(log[n]["step"], loss),
            color="tab:red",
            arrowprops={"arrowstyle": "->", "color": "tab:red"},
        )


def _mark_saves(axes: Axes, log: Sequence[dict[str, Any]]) -> None:
    steps = sorted({event["step"] for event in log if event["event"] == "saved"})
    for step in steps:
        label = "saved" if step == steps[0] else None
        axes.axvline(step, color="tab:green", linewidth=0.8, label=label)


def _losses(log: Sequence[dict[str, Any]]) -> tuple[list[int], list[float]]:
    steps = [event for event in log if event["event"] == "step"]
    return [event["step"] for event in steps], [event["loss"] for event in steps]
