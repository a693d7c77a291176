"""Pictures as PNGs, by matplotlib: the extra ``report``."""

from __future__ import annotations

import io
import textwrap
from typing import Any

from fsdp_ckpt.errors import StorageError
from fsdp_ckpt.report.scene import (
    LIGHT,
    Cross,
    Dot,
    Item,
    Line,
    Polygon,
    Rect,
    Scene,
    Text,
    width_of,
)

__all__ = ["to_png"]

MARGIN, CAPTION = 16.0, 13.0
# Pixels of the file per pixel of the scene: sharp on a dense screen.
DENSITY = 2.0
# Points, of which matplotlib's lines and texts are so and so many, per pixel at this resolution.
DPI = 100.0
POINTS = 72.0 / DPI


def to_png(scene: Scene, title: str, caption: str) -> bytes:
    """Return a picture as the bytes of a PNG, on white, with its title and caption above it.

    Raises:
        StorageError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as e:
        raise StorageError(f"PNGs need matplotlib: {e}; pip install 'fsdp-ckpt[report]'") from e
    lines = textwrap.wrap(caption, int(scene.width / width_of("x", CAPTION)))
    head = 28 + 17 * len(lines) + 10
    size = (scene.width + 2 * MARGIN, scene.height + 2 * MARGIN + head)
    figure = Figure(figsize=(size[0] / DPI, size[1] / DPI), dpi=DPI * DENSITY)
    figure.set_facecolor(LIGHT["paper"])
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(-MARGIN, scene.width + MARGIN)
    axes.set_ylim(scene.height + MARGIN, -MARGIN - head)
    above = [Text(x=0, y=16 - head, text=title, size=17, is_bold=True)]
    for n, line in enumerate(lines):
        above.append(Text(x=0, y=36 + 17 * n - head, text=line, size=CAPTION, role="muted"))
    for order, item in enumerate((*above, *scene.items)):
        _draw(axes, item, order)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=DPI * DENSITY)
    return content.getvalue()


def _draw(axes: Any, item: Item, order: int) -> None:
    from matplotlib import patches

    how: dict[str, Any] = {"color": LIGHT[item.role], "zorder": order}
    match item:
        case Rect():
            box = ((item.x, item.y), max(item.width, 0.0), max(item.height, 0.0))
            axes.add_patch(patches.Rectangle(*box, linewidth=0, **how))
        case Line():
            xs, ys = zip(*item.points, strict=True)
            style = "--" if item.is_dashed else "-"
            axes.plot(xs, ys, style, linewidth=item.thickness * POINTS, **how)
        case Polygon():
            shape = patches.Polygon(list(item.points), alpha=item.opacity, linewidth=0, **how)
            axes.add_patch(shape)
        case Dot():
            axes.add_patch(patches.Circle((item.x, item.y), item.radius, linewidth=0, **how))
        case Cross():
            half = item.size / 2
            for sign in (1, -1):
                xs = (item.x - half, item.x + half)
                ys = (item.y - sign * half, item.y + sign * half)
                axes.plot(xs, ys, linewidth=2 * POINTS, **how)
        case Text():
            axes.text(
                item.x,
                item.y,
                item.text,
                ha={"start": "left", "middle": "center", "end": "right"}[item.anchor],
                va="baseline",
                # Wider than a browser's letters.
                fontsize=item.size * POINTS * 0.92,
                fontweight="bold" if item.is_bold else "normal",
                parse_math=False,
                **how,
            )
