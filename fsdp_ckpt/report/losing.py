"""How much of a run's time trained nothing new."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from fsdp_ckpt.report.run import Incident, Life, Losses, Restore, Save

__all__ = ["losses_of"]


def losses_of(
    lives: Sequence[Life],
    saves: Iterable[Save],
    restores: Sequence[Restore],
    incidents: Iterable[Incident],
) -> Losses:
    """Add up what was lost.

    Steps that were made again count with the time that they took at first, saves among them included, from
    when the restored step was reached to when it was known last that the run went on.
    """
    redone_s = 0.0
    for incident in incidents:
        if incident.kind == "rollback" and incident.to_step is not None:
            redone_s += _since(lives[incident.life], incident.to_step, incident.at_s)
    for restore in restores:
        is_first = restore.begun_s == min(r.begun_s for r in restores if r.life == restore.life)
        if restore.step is not None and restore.life > 0 and is_first:
            redone_s += _thrown_away(lives[: restore.life], restore.step)
    between = pairwise(lives)
    return Losses(
        running_s=sum(life.ended_s - life.begun_s for life in lives),
        stall_s=sum(save.stall_s for save in saves),
        restore_s=sum(restore.seconds for restore in restores if restore.step is not None),
        redone_s=redone_s,
        stopped_s=sum(max(later.begun_s - life.ended_s, 0.0) for life, later in between),
    )


def _thrown_away(earlier: Sequence[Life], step: int) -> float:
    """Return what the last start before has trained beyond a step."""
    life = earlier[-1]
    if not life.progress or life.progress[-1][1] <= step:
        return 0.0
    return _since(life, step, life.progress[-1][0])


def _since(life: Life, step: int, until_s: float) -> float:
    """Return how long it had been training beyond a step."""
    before = [(at_s, reached) for at_s, reached in life.progress if at_s <= until_s]
    for n in range(len(before) - 1, -1, -1):
        at_s, reached = before[n]
        if reached > step:
            continue
        if reached < step and n + 1 < len(before):
            # Between two known points: as if steps took equally long.
            later_s, later = before[n + 1]
            at_s += (later_s - at_s) * (step - reached) / max(later - reached, 1)
        return max(until_s - at_s, 0.0)
    return max(until_s - life.begun_s, 0.0)
