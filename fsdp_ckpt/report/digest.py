"""From events to what a report knows of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from statistics import median

from fsdp_ckpt.report.losing import losses_of
from fsdp_ckpt.report.reading import Start, Telemetry
from fsdp_ckpt.report.run import (
    PHASES,
    Incident,
    Life,
    Outcome,
    RankSave,
    Restore,
    Run,
    Save,
    Straggler,
)
from fsdp_ckpt.telemetry.event import Event

__all__ = ["digest"]

_INCIDENTS = {
    "save.failed": "save failed",
    "save.skipped": "save skipped",
    "save.retried": "save made again",
    "restore.failed": "restore failed",
    "restore.passed_over": "checkpoint passed over",
    "rollback": "rollback",
    "spike": "spike",
    "preemption": "told to end",
    "run.raised": "job failed",
}
# A rank is behind the others if it needs so much more than the median one.
MIN_BEHIND = 1.1


def digest(telemetry: Telemetry) -> Run:
    """Put together what all ranks have told."""
    lives = tuple(_life(start) for start in telemetry.starts)
    saves: list[Save] = []
    restores: list[Restore] = []
    incidents: list[Incident] = []
    for number, start in enumerate(telemetry.starts):
        saves += _saves(number, start)
        restores += _restores(number, start)
        incidents += _incidents(number, start)
        if number + 1 < len(lives) and not lives[number].has_ended:
            incidents.append(_death(number, lives[number]))
    saves.sort(key=lambda save: save.begun_s)
    incidents.sort(key=lambda incident: incident.at_s)
    return Run(
        root=telemetry.root,
        lives=lives,
        saves=tuple(saves),
        restores=tuple(restores),
        incidents=tuple(incidents),
        growth=tuple(_growth(telemetry.starts)),
        losses=losses_of(lives, saves, restores, incidents),
        notes=telemetry.notes,
    )


def _life(start: Start) -> Life:
    ends = [event.wall_s + (event.seconds or 0.0) for event in start.events]
    return Life(
        id=start.id,
        begun_s=start.events[0].wall_s,
        ended_s=max(ends),
        world_size=start.world_size,
        has_ended=any(event.name == "run.ended" for event in start.events),
        progress=tuple(sorted(_progress(start))),
    )


def _progress(start: Start) -> Iterator[tuple[float, int]]:
    """Yield when which step was reached, as far as one rank tells."""
    for event in _of_one_rank(start):
        if event.step is None:
            continue
        end_s = event.wall_s + (event.seconds or 0.0)
        if event.name in ("progress", "run.ended"):
            yield event.wall_s, event.step
        elif event.name in ("restore.done", "rollback"):
            yield end_s, event.step
        elif event.name == "save.stall":
            yield event.wall_s, event.step
            yield end_s, event.step
        if event.name == "rollback" and isinstance(left := event.fields.get("from_step"), int):
            yield event.wall_s, left


def _of_one_rank(start: Start) -> list[Event]:
    """Return the events of the lowest rank that told any: what all ranks do alike."""
    return [event for event in start.events if event.rank == start.ranks[0]]


def _death(number: int, life: Life) -> Incident:
    step = max((step for _, step in life.progress), default=None)
    return Incident(
        at_s=life.ended_s,
        life=number,
        kind="job died",
        step=step,
        text="the job ended without saying so: killed, or failed; this is the last that it told",
    )


# --- saves ---


def _saves(number: int, start: Start) -> Iterator[Save]:
    attempts: dict[str, list[Event]] = defaultdict(list)
    for event in start.events:
        if event.name.startswith("save.") and event.attempt is not None:
            attempts[event.attempt].append(event)
    held = _held(start)
    for attempt, events in attempts.items():
        yield _save(number, attempt, events, held.get(attempt, 0.0))
    for event in _of_one_rank(start):  # it came to no attempt
        if event.attempt is None and event.name in ("save.skipped", "save.failed"):
            outcome: Outcome = "skipped" if event.name == "save.skipped" else "failed"
            yield _refused(number, event, outcome)


def _held(start: Start) -> dict[str, float]:
    """Return attempt -> how long training waited for the rest of its copy, where it waited longest."""
    newest: dict[int, str] = {}
    waited: dict[tuple[str, int], float] = defaultdict(float)
    for event in start.events:
        if event.name == "save.plan" and event.attempt is not None:
            newest[event.rank] = event.attempt
        elif event.name == "save.held" and event.rank in newest:
            waited[newest[event.rank], event.rank] += event.seconds or 0.0
    longest: dict[str, float] = {}
    for (attempt, _), seconds in waited.items():
        longest[attempt] = max(longest.get(attempt, 0.0), seconds)
    return longest


def _save(number: int, attempt: str, events: Sequence[Event], held_s: float) -> Save:
    by_rank: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        by_rank[event.rank].append(event)
    ranks = tuple(_rank_save(rank, told) for rank, told in sorted(by_rank.items()))
    committed = [e for e in events if e.name == "save.committed"]
    failed = [e for e in events if e.name == "save.failed"]
    outcome: Outcome = "committed" if committed else "failed" if failed else "unknown"
    # The commit is the coordinator's, which knows of it first.
    final = sorted(committed or failed, key=lambda e: e.rank)[:1]
    sizes = [e.fields.get("bytes") for e in committed]
    num_bytes = next((size for size in sizes if isinstance(size, int)), None)
    modes = [e.fields.get("mode") for e in events if "mode" in e.fields]
    ends = [e.wall_s + (e.seconds or 0.0) for e in final or events]
    return Save(
        life=number,
        step=events[0].step or 0,
        attempt=attempt,
        mode=str(modes[0]) if modes else "",
        outcome=outcome,
        begun_s=min(event.wall_s for event in events),
        ended_s=max(ends),
        stall_s=max((r.stall_s or 0.0 for r in ranks), default=0.0) + held_s,
        num_bytes=num_bytes,
        rate=_rate(ranks, num_bytes),
        straggler=_straggler(ranks),
        error=str(failed[0].fields.get("error", "")) if outcome == "failed" else None,
        ranks=ranks,
    )


def _rank_save(rank: int, events: Iterable[Event]) -> RankSave:
    spans: dict[str, tuple[float, float]] = {}
    stall_s, num_bytes = None, None
    for event in events:
        phase = event.name.removeprefix("save.")
        if event.seconds is None:
            continue
        if phase in PHASES:
            spans[phase] = (event.wall_s, event.wall_s + event.seconds)
        elif phase == "stall":
            stall_s = event.seconds
        if isinstance(size := event.fields.get("bytes"), int):
            num_bytes = size
    return RankSave(rank=rank, spans=spans, stall_s=stall_s, num_bytes=num_bytes)


def _refused(number: int, event: Event, outcome: Outcome) -> Save:
    return Save(
        life=number,
        step=event.step or 0,
        attempt=None,
        mode="",
        outcome=outcome,
        begun_s=event.wall_s,
        ended_s=event.wall_s,
        stall_s=0.0,
        num_bytes=None,
        rate=None,
        straggler=None,
        error=str(event.fields.get("error", "")) or None,
        ranks=(),
    )


def _rate(ranks: Sequence[RankSave], num_bytes: int | None) -> float | None:
    spans = [rank.spans["persist"] for rank in ranks if "persist" in rank.spans]
    if not spans or num_bytes is None:
        return None
    seconds = max(end for _, end in spans) - min(begin for begin, _ in spans)
    return num_bytes / seconds if seconds > 0 else None


def _straggler(ranks: Sequence[RankSave]) -> Straggler | None:
    ends = {rank.rank: rank.durable_s for rank in ranks if rank.durable_s is not None}
    begins = [rank.begun_s for rank in ranks if rank.begun_s is not None]
    if len(ends) < 3:
        return None
    last = max(ends, key=lambda rank: ends[rank])
    middle = median(ends.values())
    if ends[last] - min(begins) < MIN_BEHIND * (middle - min(begins)):
        return None
    slow = next(rank for rank in ranks if rank.rank == last)
    excess = {}
    for phase in ("wait", "plan", "copy", "persist"):
        lengths = [_length(rank, phase) for rank in ranks]
        excess[phase] = _length(slow, phase) - median(lengths)
    if excess["copy"] > 0.5 * excess["persist"]:
        excess["persist"] = 0.0  # which runs from the copy's begin: it is late since the copy is
    phase = max(excess, key=lambda name: excess[name])
    return Straggler(rank=last, behind_s=ends[last] - middle, phase=phase)


def _length(rank: RankSave, phase: str) -> float:
    begin, end = rank.spans.get(phase, (0.0, 0.0))
    return end - begin


# --- restores, incidents, storage ---


def _restores(number: int, start: Start) -> Iterator[Restore]:
    ranks: dict[int, list[tuple[Event, dict[str, float]]]] = defaultdict(list)
    laps: dict[int, dict[str, float]] = defaultdict(dict)
    for event in sorted(start.events, key=lambda e: e.wall_s + (e.seconds or 0.0)):
        phase = event.name.removeprefix("restore.")
        if event.name == "restore.done":
            ranks[event.rank].append((event, laps.pop(event.rank, {})))
        elif event.name == "restore.failed":
            laps.pop(event.rank, None)
        elif event.name.startswith("restore.") and event.seconds is not None:
            laps[event.rank][phase] = event.seconds
    # All ranks make the same restores, in the same order.
    for n in range(max(map(len, ranks.values()), default=0)):
        done = [found[n] for found in ranks.values() if n < len(found)]
        names = {name for _, told in done for name in told}
        yield Restore(
            life=number,
            step=done[0][0].step,
            begun_s=min(event.wall_s for event, _ in done),
            seconds=max(event.seconds or 0.0 for event, _ in done),
            laps={name: max(told.get(name, 0.0) for _, told in done) for name in sorted(names)},
        )


def _incidents(number: int, start: Start) -> Iterator[Incident]:
    for event in _of_one_rank(start):
        kind = _INCIDENTS.get(event.name)
        if kind is None:
            continue
        left = event.fields.get("from_step")
        is_back = event.name == "rollback" and isinstance(left, int)
        told = (event.fields.get(name) for name in ("error", "reason", "action"))
        yield Incident(
            at_s=event.wall_s,
            life=number,
            kind=kind,
            step=left if is_back else event.step,
            text="; ".join(str(text) for text in told if text),
            to_step=event.step if is_back else None,
        )


def _growth(starts: Iterable[Start]) -> Iterator[tuple[float, int]]:
    """Yield what lies on storage after each commit and deletion, as far as was told."""
    held: dict[str, int] = {}
    for start in starts:
        for event in _of_one_rank(start):
            size = event.fields.get("bytes")
            if event.attempt is None or event.name not in ("save.committed", "retention.deleted"):
                continue
            if event.name == "save.committed":
                held[event.attempt] = size if isinstance(size, int) else 0
            elif held.pop(event.attempt, None) is None:
                continue
            yield event.wall_s, sum(held.values())
