"""A run as pictures: how it went on, what its saves took, where its time went."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

from fsdp_ckpt.report.plot import Plot, add_legend, clock_text, legend_height, make_plot
from fsdp_ckpt.report.run import Losses, Run, Save
from fsdp_ckpt.report.scene import Cross, Dot, Line, Polygon, Rect, Scene, Text, width_of
from fsdp_ckpt.report.units import BYTES, COUNT, RATE, SECONDS, Scale

__all__ = ["draw_costs", "draw_growth", "draw_losses", "draw_progress", "draw_rates"]

T = TypeVar("T")

HEIGHT = 240.0
# Of more saves than this, several share a bar.
MAX_BARS = 80


def draw_progress(run: Run, width: float) -> Scene:
    """Draw step over time, with saves, starts, and what went wrong."""
    begun_s = run.lives[0].begun_s
    end_s = max(life.ended_s for life in run.lives) - begun_s
    steps = [step for life in run.lives for _, step in life.progress]
    highest = max([*steps, *(save.step for save in run.saves), 1])
    legend = [("train", "step"), ("publish", "checkpoint")]
    if len(run.lives) > 1:
        legend.append(("grid", "not running"))
    if run.incidents:
        legend.append(("bad", "went wrong"))
    plot = make_plot(
        "step over time",
        (width, HEIGHT + 40),
        (0.0, end_s, SECONDS, "since the run began"),
        (0.0, highest * 1.04, COUNT, "step"),
        legend,
    )
    for life, later in pairwise(run.lives):
        left, right = plot.x(life.ended_s - begun_s), plot.x(later.begun_s - begun_s)
        if right > left:
            box = (max(right - left, 1.0), plot.bottom - plot.top)
            title = f"not running for {SECONDS.text(later.begun_s - life.ended_s)}"
            scene_box = Rect(
                x=left, y=plot.top, width=box[0], height=box[1], role="grid", title=title
            )
            plot.scene.add(scene_box)
    for life in run.lives:
        points = [(plot.x(at_s - begun_s), plot.y(step)) for at_s, step in life.progress]
        if len(points) > 1:
            plot.scene.add(Line(points=_thinned(points), role="train", thickness=2.5))
    _mark_saves(plot, run, begun_s)
    return plot.scene


def _mark_saves(plot: Plot, run: Run, begun_s: float) -> None:
    for save in _thinned(run.committed):
        title = f"step {save.step}, committed {clock_text(save.ended_s)} UTC"
        x, y = plot.x(save.begun_s - begun_s), plot.y(save.step)
        plot.scene.add(Dot(x=x, y=y, radius=3, role="publish", title=title))
    for incident in _thinned(run.incidents):
        x = plot.x(incident.at_s - begun_s)
        y = plot.y(incident.step) if incident.step is not None else plot.bottom - 6
        title = f"{incident.kind}: {incident.text}"
        plot.scene.add(Cross(x=x, y=y, size=9, role="bad", title=title))


def draw_costs(run: Run, width: float) -> Scene:
    """Draw how long each save took, and how much of it training waited."""
    saves = [save for save in run.saves if save.ranks]
    bars = _binned(saves)
    highest = max((max(s.total_s for s in bar) for bar in bars), default=0.0)
    plot = _bar_plot(
        "time of each save",
        width,
        len(bars),
        (0.0, highest * 1.05 or 1.0, SECONDS, "time of a save"),
        [("persist", "until committed"), ("stall", "training waits"), ("bad", "not committed")],
        saves,
    )
    room = (plot.right - plot.left) / max(len(bars), 1)
    thick = min(room * 0.7, 26.0)
    for n, bar in enumerate(bars):
        middle = plot.left + (n + 0.5) * room
        slowest = max(bar, key=lambda save: save.total_s)
        is_bad = any(save.outcome != "committed" for save in bar)
        role = "bad" if is_bad else "persist"
        for value, kind in ((slowest.total_s, role), (max(s.stall_s for s in bar), "stall")):
            top = plot.y(min(value, highest or value))
            title = f"{_steps_text(bar)}: {SECONDS.text(value)}"
            left = middle - thick / 2
            height = max(plot.bottom - top, 1.0)
            box = Rect(x=left, y=top, width=thick, height=height, role=kind, title=title)
            plot.scene.add(box)
    return plot.scene


def draw_rates(run: Run, width: float) -> Scene:
    """Draw at what rate each save was written, over all ranks."""
    saves = [save for save in run.committed if save.rate is not None]
    bars = _binned(saves)
    values = [[save.rate for save in bar if save.rate is not None] for bar in bars]
    highest = max((max(v) for v in values), default=0.0)
    plot = _bar_plot(
        "rate of each save",
        width,
        len(bars),
        (0.0, highest * 1.08 or 1.0, RATE, "written, all ranks"),
        [],
        saves,
    )
    room = (plot.right - plot.left) / max(len(bars), 1)
    for n, (bar, rates) in enumerate(zip(bars, values, strict=True)):
        middle, low, high = plot.left + (n + 0.5) * room, min(rates), max(rates)
        plot.scene.add(
            Line(points=((middle, plot.bottom), (middle, plot.y(high))), role="grid", thickness=2)
        )
        title = f"{_steps_text(bar)}: {RATE.text(high)}"
        plot.scene.add(Dot(x=middle, y=plot.y(high), radius=4, role="persist", title=title))
        if low < high:
            plot.scene.add(Dot(x=middle, y=plot.y(low), radius=2.5, role="wait"))
    return plot.scene


def draw_growth(run: Run, width: float) -> Scene:
    """Draw what the run's checkpoints take on storage, over time."""
    begun_s = run.lives[0].begun_s
    end_s = max(life.ended_s for life in run.lives) - begun_s
    highest = max((size for _, size in run.growth), default=0)
    plot = make_plot(
        "checkpoints on storage over time",
        (width, HEIGHT),
        (0.0, end_s, SECONDS, "since the run began"),
        (0.0, highest * 1.08 or 1.0, BYTES, "checkpoints on storage"),
    )
    points, size = [(plot.x(0.0), plot.y(0.0))], 0
    for at_s, later in run.growth:
        points += [(plot.x(at_s - begun_s), plot.y(size)), (plot.x(at_s - begun_s), plot.y(later))]
        size = later
    points.append((plot.x(end_s), plot.y(size)))
    corners = ((plot.x(end_s), plot.bottom), (plot.left, plot.bottom))
    plot.scene.add(Polygon(points=(*points, *corners), role="persist", opacity=0.18))
    plot.scene.add(Line(points=points, role="persist", thickness=2))
    return plot.scene


def draw_losses(losses: Losses, width: float) -> Scene:
    """Draw where the time went, as one bar."""
    parts = [
        ("train", "training", max(losses.running_s - losses.lost_s, 0.0)),
        ("stall", "waiting for saves", losses.stall_s),
        ("restore", "restores", losses.restore_s),
        ("redone", "steps made again", losses.redone_s),
    ]
    whole = sum(seconds for _, _, seconds in parts) or 1.0
    legend = [
        (role, f"{name} {SECONDS.text(seconds)}, {_percent(seconds / whole)}")
        for role, name, seconds in parts
    ]
    bar_top = 6.0
    height = bar_top + 30 + 24 + legend_height(legend, width)
    scene = Scene(width, height, "where the time went")
    x = 0.0
    for (role, name, seconds), (_, text) in zip(parts, legend, strict=True):
        room = width * seconds / whole
        scene.add(Rect(x=x, y=bar_top, width=room, height=30, role=role, title=text))
        if room > width_of(name, 12) + 12:
            scene.add(Text(x=x + 8, y=bar_top + 20, text=name, role="paper", is_bold=True))
        x += room
    add_legend(scene, legend, 0.0, bar_top + 30 + 22)
    return scene


def _percent(share: float) -> str:
    percent = 100 * share
    return "under 0.01 %" if 0 < percent < 0.01 else f"{percent:.3g} %"


def _bar_plot(
    label: str,
    width: float,
    num_bars: int,
    y: tuple[float, float, Scale, str],
    legend: Sequence[tuple[str, str]],
    saves: Sequence[Save],
) -> Plot:
    """Return a chart whose bars are saves, named below by their steps where there is room."""
    plot = make_plot(label, (width, HEIGHT), None, y, legend)
    bars = _binned(saves)
    room = (plot.right - plot.left) / max(num_bars, 1)
    texts = [str(bar[0].step) for bar in bars]
    widest = max((width_of(text, 11) for text in texts), default=1.0) + 8
    every = max(int(-(-widest // room)), 1)
    for n in range(0, len(texts), every):
        middle = plot.left + (n + 0.5) * room
        at = plot.bottom + 16
        plot.scene.add(Text(x=middle, y=at, text=texts[n], anchor="middle", size=11, role="muted"))
    name = "step of the save"
    at = plot.bottom + 33
    plot.scene.add(Text(x=plot.right, y=at, text=name, anchor="end", size=11, role="muted"))
    return plot


def _binned(saves: Sequence[Save]) -> list[Sequence[Save]]:
    """Put so many neighbours together that there are at most ``MAX_BARS``."""
    size = max(-(-len(saves) // MAX_BARS), 1)
    return [saves[n : n + size] for n in range(0, len(saves), size)]


def _steps_text(bar: Sequence[Save]) -> str:
    first, last = bar[0].step, bar[-1].step
    return f"step {first}" if len(bar) == 1 else f"steps {first} to {last}, the most"


def _thinned(items: Sequence[T], most: int = 2000) -> Sequence[T]:
    every = max(-(-len(items) // most), 1)
    return [*items[::every], items[-1]] if every > 1 else items
