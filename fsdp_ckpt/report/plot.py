"""What charts have in common: a frame with axes, and a legend that breaks into lines."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fsdp_ckpt.report.scene import Line, Rect, Scene, Text, width_of
from fsdp_ckpt.report.units import Axis, Scale, make_axis

__all__ = ["Plot", "add_legend", "clock_text", "legend_height", "make_plot"]

TOP, BOTTOM = 28.0, 40.0
ROW = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A scene with axes.

    Args:
        scene: To draw on.
        x: Value → pixel.
        y: Likewise.
        left: Of the frame, in pixels.
        right: Likewise.
        top: Likewise.
        bottom: Likewise.
    """

    scene: Scene
    x: Callable[[float], float]
    y: Callable[[float], float]
    left: float
    right: float
    top: float
    bottom: float


def make_plot(
    label: str,
    size: tuple[float, float],
    x: tuple[float, float, Scale, str] | None,
    y: tuple[float, float, Scale, str],
    legend: Sequence[tuple[str, str]] = (),
) -> Plot:
    """Return an empty chart.

    Args:
        label: What it shows.
        size: Width and height, in pixels.
        x: Lowest and highest value, their kind, and what they are; ``None`` for bars, which name themselves.
        y: Likewise.
        legend: (role, text), above the frame.
    """
    width, height = size
    scene = Scene(width, height, label)
    top = TOP + legend_height(legend, width)
    y_axis = make_axis(y[0], y[1], y[2], max(int((height - top - BOTTOM) / 36), 2))
    left = 14 + max((width_of(text, 11) for _, text in y_axis.ticks), default=20.0)
    right, bottom = width - 14.0, height - BOTTOM
    x_axis = None if x is None else make_axis(*x[:3], max(int((right - left) / 68), 2))
    plot = Plot(
        scene=scene,
        x=(lambda value: value) if x_axis is None else x_axis.place(left, right),
        y=y_axis.place(bottom, top),
        left=left,
        right=right,
        top=top,
        bottom=bottom,
    )
    add_legend(scene, legend, 0.0, 12.0)
    scene.add(Text(x=0, y=top - 10, text=_named(y[3], y_axis), size=11, role="muted"))
    for value, text in y_axis.ticks:
        at = plot.y(value)
        scene.add(Line(points=((left, at), (right, at)), role="grid"))
        scene.add(Text(x=left - 6, y=at + 4, text=text, anchor="end", size=11, role="muted"))
    if x is not None and x_axis is not None:
        _draw_x_axis(plot, x_axis, x[3])
    return plot


def _draw_x_axis(plot: Plot, axis: Axis, name: str) -> None:
    bottom = plot.bottom
    for value, text in axis.ticks:
        at = plot.x(value)
        plot.scene.add(Line(points=((at, bottom), (at, bottom + 4)), role="muted"))
        label = Text(x=at, y=bottom + 16, text=text, anchor="middle", size=11, role="muted")
        plot.scene.add(label)
    title = _named(name, axis)
    below = Text(x=plot.right, y=bottom + 33, text=title, anchor="end", size=11, role="muted")
    plot.scene.add(below)


def _named(what: str, axis: Axis) -> str:
    return f"{what}, {axis.name}" if axis.name else what


def legend_height(entries: Sequence[tuple[str, str]], width: float) -> float:
    """Return how much room a legend takes."""
    return ROW * len(_rows(entries, width))


def add_legend(
    scene: Scene, entries: Sequence[tuple[str, str]], left: float, baseline: float
) -> None:
    """Draw a legend: a patch of colour and a text for each entry."""
    for n, row in enumerate(_rows(entries, scene.width - left)):
        x, y = left, baseline + n * ROW
        for role, text in row:
            scene.add(Rect(x=x, y=y - 9, width=10, height=10, role=role, radius=2))
            scene.add(Text(x=x + 15, y=y, text=text, size=11.5, role="muted"))
            x += _entry_width(text)


def _rows(entries: Sequence[tuple[str, str]], width: float) -> list[list[tuple[str, str]]]:
    rows: list[list[tuple[str, str]]] = []
    free = 0.0
    for entry in entries:
        needed = _entry_width(entry[1])
        if needed > free or not rows:
            rows.append([])
            free = width
        rows[-1].append(entry)
        free -= needed
    return rows


def _entry_width(text: str) -> float:
    return 15 + width_of(text, 11.5) + 14


def clock_text(seconds: float) -> str:
    """Return a time as ``2026-01-31 09:30:00`` UTC."""
    try:
        return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return "?"
