"""A picture as a list of shapes, drawn as SVG or by matplotlib: what is laid out once looks the same in both.

Positions are in pixels from the top left. Colours are named by their role, so that a page can have them light
or dark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal, TypeAlias

__all__ = [
    "DARK",
    "LIGHT",
    "Cross",
    "Dot",
    "Item",
    "Line",
    "Polygon",
    "Rect",
    "Scene",
    "Text",
    "to_svg",
    "width_of",
]

Anchor = Literal["start", "middle", "end"]
Point: TypeAlias = tuple[float, float]

LIGHT = {
    "paper": "#ffffff",
    "ink": "#1b2430",
    "muted": "#5d6b7e",
    "grid": "#e5e9ef",
    "band": "#f2f4f8",
    "wait": "#b9c1cd",
    "plan": "#8a6fd1",
    "copy": "#e2892b",
    "persist": "#3b7dd8",
    "seal": "#a9cdbb",
    "publish": "#1f9466",
    "stall": "#c4501b",
    "restore": "#8a6fd1",
    "redone": "#cf3f4f",
    "train": "#7fb894",
    "bad": "#cf3f4f",
}
DARK = {
    "paper": "#151a21",
    "ink": "#e6ebf2",
    "muted": "#9aa8ba",
    "grid": "#2a323d",
    "band": "#0d1116",
    "wait": "#5b6775",
    "plan": "#a48df0",
    "copy": "#f0a04a",
    "persist": "#5b9bf0",
    "seal": "#4f7f69",
    "publish": "#3cc48d",
    "stall": "#ef7a45",
    "restore": "#a48df0",
    "redone": "#f0616f",
    "train": "#4c8f68",
    "bad": "#f0616f",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rect:
    """A filled box; ``title`` is shown where the pointer rests on it."""

    x: float
    y: float
    width: float
    height: float
    role: str
    title: str = ""
    radius: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line through points."""

    points: Sequence[Point]
    role: str
    thickness: float = 1.0
    is_dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Polygon:
    """A filled shape, see-through by ``opacity``."""

    points: Sequence[Point]
    role: str
    opacity: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """A disc."""

    x: float
    y: float
    radius: float
    role: str
    title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cross:
    """Two crossed strokes."""

    x: float
    y: float
    size: float
    role: str
    title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A line of text; ``y`` is its baseline."""

    x: float
    y: float
    text: str
    anchor: Anchor = "start"
    size: float = 12.0
    role: str = "ink"
    is_bold: bool = False


Item: TypeAlias = Rect | Line | Polygon | Dot | Cross | Text


@dataclass(slots=True)
class Scene:
    """A picture being laid out.

    Args:
        width: In pixels.
        height: Likewise.
        label: What it shows, for who cannot see it.
        items: Drawn in this order.
    """

    width: float
    height: float
    label: str
    items: list[Item] = field(default_factory=list)

    def add(self, *items: Item) -> None:
        """Draw on top of what is there."""
        self.items.extend(items)


def width_of(text: str, size: float = 12.0) -> float:
    """Return about how wide a text is, rather too wide than too narrow."""
    return 0.6 * size * len(text)


def to_svg(scene: Scene) -> str:
    """Return the picture as an ``svg`` element whose colours come from the page's style."""
    body = "".join(_element(item) for item in scene.items)
    return (
        f'<svg role="img" aria-label="{escape(scene.label)}" viewBox="0 0 {scene.width:g} '
        f'{scene.height:g}" width="{scene.width:g}" height="{scene.height:g}">{body}</svg>'
    )


def _element(item: Item) -> str:
    match item:
        case Rect():
            radius = f' rx="{item.radius:g}"' if item.radius else ""
            return _titled(
                f'<rect class="f-{item.role}" x="{item.x:.1f}" y="{item.y:.1f}" '
                f'width="{max(item.width, 0):.1f}" height="{max(item.height, 0):.1f}"{radius}',
                "rect",
                item.title,
            )
        case Line():
            dashes = ' stroke-dasharray="4 3"' if item.is_dashed else ""
            return (
                f'<polyline class="s-{item.role}" points="{_points(item.points)}" '
                f'stroke-width="{item.thickness:g}"{dashes}/>'
            )
        case Polygon():
            return (
                f'<polygon class="f-{item.role}" points="{_points(item.points)}" '
                f'fill-opacity="{item.opacity:g}"/>'
            )
        case Dot():
            start = f'<circle class="f-{item.role}" cx="{item.x:.1f}" cy="{item.y:.1f}" '
            return _titled(f'{start}r="{item.radius:g}"', "circle", item.title)
        case Cross():
            x, y, half = item.x, item.y, item.size / 2
            path = f"M{x - half:.1f} {y - half:.1f}l{item.size:g} {item.size:g}"
            path += f"M{x - half:.1f} {y + half:.1f}l{item.size:g} {-item.size:g}"
            return _titled(
                f'<path class="s-{item.role}" d="{path}" stroke-width="2"', "path", item.title
            )
        case Text():
            bold = ' font-weight="600"' if item.is_bold else ""
            anchor = f' text-anchor="{item.anchor}"' if item.anchor != "start" else ""
            return (
                f'<text class="f-{item.role}" x="{item.x:.1f}" y="{item.y:.1f}" '
                f'font-size="{item.size:g}"{anchor}{bold}>{escape(item.text)}</text>'
            )


def _titled(start: str, name: str, title: str) -> str:
    return f"{start}><title>{escape(title)}</title></{name}>" if title else f"{start}/>"


def _points(points: Sequence[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
