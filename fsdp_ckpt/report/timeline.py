"""One save as a picture: a lane per rank, or, of many ranks, the usual ones and those that were late.

rank 0   ▒▒plan▓▓copy████ persist ░░seal░ publish
         ━━━━━━━━━━━━━━━ training waits
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from fsdp_ckpt.report.plot import add_legend, legend_height
from fsdp_ckpt.report.run import PHASES, RankSave, Save
from fsdp_ckpt.report.scene import Dot, Line, Rect, Scene, Text, width_of
from fsdp_ckpt.report.units import SECONDS, Axis, make_axis

__all__ = ["MAX_LANES", "draw_timeline"]

# Of more ranks than this, those between the fastest and the latest are drawn as dots.
MAX_LANES = 16
NUM_LATEST = 8
LANE, BAR, CLOUD = 22.0, 12.0, 96.0
LEGEND = (
    *((phase, phase) for phase in PHASES),
    ("stall", "training waits"),
)


@dataclass(frozen=True, slots=True)
class _Lane:
    name: str
    parts: tuple[tuple[str, float, float, str], ...]  # phase, begin, end, title
    stall: tuple[float, float] | None  # begin, end
    is_late: bool = False


def draw_timeline(save: Save, width: float) -> Scene:
    """Draw a save that ranks have told of.

    Args:
        save: With at least one rank.
        width: In pixels.
    """
    lanes = _lanes(save)
    is_many = len(save.ranks) > MAX_LANES
    top = 8 + legend_height(LEGEND, width)
    cloud_top = top + len(lanes) * LANE + 26
    bottom = cloud_top + CLOUD if is_many else top + len(lanes) * LANE + 4
    scene = Scene(width, bottom + 36, f"timeline of the save of step {save.step}")
    add_legend(scene, LEGEND, 0.0, 12.0)
    left = 12 + max(width_of(lane.name, 11.5) for lane in lanes)
    right = width - 14.0
    end_s = max((end for lane in lanes for _, _, end, _ in lane.parts), default=1e-3)
    axis = make_axis(0.0, end_s, SECONDS, max(int((right - left) / 68), 2))
    _draw_grid(scene, axis, left, right, (top, bottom))
    x = axis.place(left, right)
    for n, lane in enumerate(lanes):
        y = top + n * LANE + 4
        role = "bad" if lane.is_late else "ink"
        label = Text(x=left - 8, y=y + 10, text=lane.name, anchor="end", size=11.5, role=role)
        scene.add(label)
        for phase, begin, end, title in lane.parts:
            length = max(x(end) - x(begin), 0.8)
            scene.add(Rect(x=x(begin), y=y, width=length, height=BAR, role=phase, title=title))
        if lane.stall is not None:
            begun, stop = (x(min(at, end_s)) for at in lane.stall)
            length = max(stop - begun, 1.5)
            scene.add(Rect(x=begun, y=y + BAR + 1, width=length, height=2.5, role="stall"))
    if is_many:
        _draw_cloud(scene, save, axis, (left, right), cloud_top)
    return scene


def _draw_grid(
    scene: Scene, axis: Axis, left: float, right: float, rows: tuple[float, float]
) -> None:
    x = axis.place(left, right)
    for value, text in axis.ticks:
        scene.add(Line(points=((x(value), rows[0]), (x(value), rows[1])), role="grid"))
        at = rows[1] + 15
        scene.add(Text(x=x(value), y=at, text=text, anchor="middle", size=11, role="muted"))
    name = f"since the call, {axis.name}"
    scene.add(Text(x=right, y=rows[1] + 31, text=name, anchor="end", size=11, role="muted"))


def _draw_cloud(
    scene: Scene, save: Save, axis: Axis, edges: tuple[float, float], top: float
) -> None:
    """Draw when each rank's file was durable: rank from top to bottom."""
    x = axis.place(*edges)
    told = [(rank.rank, rank.durable_s) for rank in save.ranks if rank.durable_s is not None]
    last = max((rank for rank, _ in told), default=0)
    scene.add(Text(x=edges[0], y=top - 8, text="file durable, each rank", size=11, role="muted"))
    for rank, durable_s in told:
        y = top + 4 + (CLOUD - 10) * rank / max(last, 1)
        is_late = save.straggler is not None and rank == save.straggler.rank
        role, radius = ("bad", 3.0) if is_late else ("persist", 1.4)
        after_s = durable_s - save.begun_s
        title = f"rank {rank}: {SECONDS.text(after_s)}"
        scene.add(Dot(x=x(after_s), y=y, radius=radius, role=role, title=title))
    for rank, y in ((0, top + 8), (last, top + CLOUD - 2)):
        name = f"rank {rank}"
        scene.add(Text(x=edges[0] - 8, y=y, text=name, anchor="end", size=11, role="muted"))


def _lanes(save: Save) -> list[_Lane]:
    late = save.straggler.rank if save.straggler else None
    if len(save.ranks) <= MAX_LANES:
        return [_lane(save, rank, is_late=rank.rank == late) for rank in save.ranks]
    by_end = sorted(save.ranks, key=lambda rank: (rank.durable_s or 0.0, -rank.rank))
    latest = by_end[-NUM_LATEST:][::-1]
    usual = [
        _typical(save, f"median of {len(by_end)}", by_end, 0.5),
        _typical(save, "90th percentile", by_end, 0.9),
    ]
    return [*usual, *(_lane(save, rank, is_late=rank.rank == late) for rank in latest)]


def _lane(save: Save, rank: RankSave, *, is_late: bool) -> _Lane:
    """Return a rank's phases one after the other: what it did last where two overlap."""
    parts = []
    reached = 0.0
    for phase in PHASES:
        if phase not in rank.spans:
            continue
        begin, end = (at - save.begun_s for at in rank.spans[phase])
        title = f"rank {rank.rank}: {phase} {SECONDS.text(end - begin)}"
        if end > reached:
            parts.append((phase, max(begin, reached), end, title))
            reached = end
    stall = None
    if rank.stall_s is not None and rank.begun_s is not None:
        called = rank.begun_s - save.begun_s
        stall = (called, called + rank.stall_s)
    return _Lane(f"rank {rank.rank}", tuple(parts), stall, is_late)


def _typical(save: Save, name: str, ranks: Sequence[RankSave], share: float) -> _Lane:
    """Return a lane of each phase's end at this percentile over the ranks."""
    lanes = [_lane(save, rank, is_late=False) for rank in ranks]
    parts = []
    reached = 0.0
    for phase in PHASES:
        ends = sorted(end for lane in lanes for p, _, end, _ in lane.parts if p == phase)
        if not ends or phase == "publish":  # which only the coordinator does
            continue
        end = ends[min(int(share * len(ends)), len(ends) - 1)]
        if end > reached:
            parts.append((phase, reached, end, f"{name}: {phase} until {SECONDS.text(end)}"))
            reached = end
    stops = [lane.stall[1] for lane in lanes if lane.stall is not None]
    return _Lane(name, tuple(parts), (0.0, median(stops)) if stops else None)
