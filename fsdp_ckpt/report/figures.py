"""Which pictures a report has, in their order: the same on the page and as PNGs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from fsdp_ckpt.report.charts import (
    draw_costs,
    draw_growth,
    draw_losses,
    draw_progress,
    draw_rates,
)
from fsdp_ckpt.report.run import Run, Save
from fsdp_ckpt.report.scene import Scene
from fsdp_ckpt.report.timeline import draw_timeline
from fsdp_ckpt.report.units import SECONDS

__all__ = ["Figure", "figures_of", "timelines_of"]

# Timelines of more saves would make the page heavy: the slowest and the newest are what is looked at.
NUM_SLOWEST, NUM_NEWEST = 5, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One picture.

    Args:
        name: For a file.
        title: Above it.
        caption: How to read it; a line or two.
        draw: Width in pixels → the picture.
    """

    name: str
    title: str
    caption: str
    draw: Callable[[float], Scene]


def figures_of(run: Run) -> Iterator[Figure]:
    """Yield the pictures of the whole run; those without anything to show are left out."""
    if any(len(life.progress) > 1 for life in run.lives):
        yield Figure(
            name="progress",
            title="The run",
            caption="Every start of the job, its checkpoints, and what went wrong.",
            draw=partial(draw_progress, run),
        )
    yield Figure(
        name="time",
        title="Where the time went",
        caption="Of the time that the job was running. Steps made again count from the restored step to the "
        "last that was told; what steps beside a save are slower is not measured.",
        draw=partial(draw_losses, run.losses),
    )
    if any(save.ranks for save in run.saves):
        yield Figure(
            name="saves",
            title="What each save took",
            caption="From the call to the commit, and how much of that training waited.",
            draw=partial(draw_costs, run),
        )
    if any(save.rate is not None for save in run.committed):
        yield Figure(
            name="rates",
            title="How fast each save was written",
            caption="All ranks together, from the first byte handed over until the last file was durable.",
            draw=partial(draw_rates, run),
        )
    if run.growth:
        yield Figure(
            name="storage",
            title="What lies on storage",
            caption="Checkpoints committed and not deleted since, as far as the telemetry goes back.",
            draw=partial(draw_growth, run),
        )


def timelines_of(run: Run) -> list[Figure]:
    """Return the timelines of the newest save, the slowest ones, and those that failed, newest first."""
    return [
        Figure(
            name=f"save-{save.step}" + (f"-{save.attempt}" if _is_again(run, save) else ""),
            title=f"Step {save.step}",
            caption=_caption(save),
            draw=partial(draw_timeline, save),
        )
        for save in _to_show(run.saves)
    ]


def _to_show(saves: Sequence[Save]) -> list[Save]:
    drawn = [save for save in saves if any(rank.spans for rank in save.ranks)]
    slowest = sorted(drawn, key=lambda save: save.total_s)[-NUM_SLOWEST:]
    bad = [save for save in drawn if save.outcome != "committed"][-NUM_NEWEST:]
    chosen = {id(save) for save in (*drawn[-NUM_NEWEST:], *slowest, *bad)}
    return [save for save in reversed(drawn) if id(save) in chosen]


def _is_again(run: Run, save: Save) -> bool:
    return sum(other.step == save.step for other in run.saves) > 1


def _caption(save: Save) -> str:
    parts = [f"{save.mode or 'save'}, {save.outcome} after {SECONDS.text(save.total_s)}"]
    if save.stall_s:
        parts.append(f"training waited {SECONDS.text(save.stall_s)}")
    if save.straggler is not None:
        late = save.straggler
        behind = SECONDS.text(late.behind_s)
        parts.append(f"rank {late.rank} was last, {behind} behind the median, in {late.phase}")
    if save.error:
        parts.append(save.error)
    return "; ".join(parts)
