"""From lines on storage to events on one axis of time.

Invariant: no line stands twice, and what could not be read is said in a note rather than guessed.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from fsdp_ckpt.errors import CorruptCheckpointError, NotFoundError
from fsdp_ckpt.manifest.strict_json import parse_json
from fsdp_ckpt.storage.store import Store
from fsdp_ckpt.telemetry.event import FORMAT, VERSION, Event
from fsdp_ckpt.telemetry.start import FOLDER

__all__ = ["Start", "Telemetry", "read_telemetry"]

MAX_OBJECT_BYTES = 64 * 2**20
# Below this an offset is the time that the answer took rather than a clock's.
MIN_OFFSET_S = 0.05
_OBJECT = re.compile(r"rank-(\d{5,9})-(\d{6,12})\.jsonl", re.ASCII)
_START = re.compile(r"\d{8}T\d{12}-[0-9a-f]{12}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of the job.

    Args:
        id: Sorts by time.
        world_size: Ranks of the job.
        ranks: Those that left lines.
        events: Of all ranks, by time; ``wall_s`` is by the coordinator's clock.
    """

    id: str
    world_size: int
    ranks: tuple[int, ...]
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """Everything that a run has told.

    Args:
        root: The run's root.
        starts: The oldest first.
        notes: What could not be read, a line each.
    """

    root: str
    starts: tuple[Start, ...]
    notes: tuple[str, ...]


@dataclass(slots=True)
class _Found:
    """What the objects of one start hold."""

    headers: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    events: dict[tuple[int, int], Event] = field(default_factory=dict)  # by rank and number
    problems: Counter[str] = field(default_factory=Counter)


def read_telemetry(root: Store) -> Telemetry:
    """Read what a run has told.

    Raises:
        NotFoundError: It has told nothing.
        StorageError: The root cannot be read now.
    """
    folder = root.child(FOLDER)
    starts: list[Start] = []
    notes: list[str] = []
    for name in filter(_START.fullmatch, folder.list_folders()):
        found = _read_start(folder.child(name))
        if found.events:
            starts.append(_start(name, found, notes))
        for problem, number in sorted(found.problems.items()):
            notes.append(f"start {name}: {number} × {problem}")
    if not starts:
        why = f" ({'; '.join(notes)})" if notes else ""
        raise NotFoundError(
            f"{root.url}: no telemetry here{why}; name a run's root, and train with "
            "CheckpointManager(..., telemetry=TelemetryOptions())"
        )
    return Telemetry(root=root.url, starts=tuple(starts), notes=tuple(notes))


def _read_start(store: Store) -> _Found:
    found = _Found()
    names = [name for name in store.list_files() if _OBJECT.fullmatch(name)]

    def read(name: str) -> bytes | None:
        try:
            return store.read(name, MAX_OBJECT_BYTES)
        except (NotFoundError, CorruptCheckpointError):
            return None  # a newer object has its lines by now; or it is none of ours

    with ThreadPoolExecutor(min(max(store.concurrency, 1), 32)) as readers:
        for data in readers.map(read, sorted(names)):
            if data is None:
                found.problems["object that could not be read"] += 1
            else:
                _take_object(found, data)
    return found


def _take_object(found: _Found, data: bytes) -> None:
    """Take the lines of one object."""
    first, _, rest = data.partition(b"\n")
    try:
        header = parse_json(first)
        if header["format"] != FORMAT or type(header["version"]) is not int:
            raise ValueError
        rank = header["rank"]
    except (CorruptCheckpointError, KeyError, TypeError, ValueError):
        found.problems["object without a readable first line"] += 1
        return
    if header["version"] > VERSION:
        found.problems["object of a newer version; upgrade to read it"] += 1
        return
    if type(rank) is not int or type(header.get("world_size")) is not int:
        found.problems["object without a readable first line"] += 1
        return
    found.headers[rank] = header
    for record in _records(rest.splitlines()):
        try:
            event = Event.from_json(record)
            number = record["n"]
        except (CorruptCheckpointError, KeyError):
            found.problems["line that was cut or is not ours"] += 1
            continue
        if event.rank == rank and type(number) is int:
            found.events[rank, number] = event


def _records(lines: list[bytes]) -> list[Any]:
    """Parse lines, all at once where they are all whole; what is no JSON comes as ``None``."""
    try:
        records = parse_json(b"[" + b",".join(lines) + b"]")
        if len(records) == len(lines):
            return list(records)
    except CorruptCheckpointError:
        pass
    records = []
    for line in lines:
        try:
            records.append(parse_json(line))
        except CorruptCheckpointError:
            records.append(None)
    return records


def _start(name: str, found: _Found, notes: list[str]) -> Start:
    world_size = max(header["world_size"] for header in found.headers.values())
    ranks = tuple(sorted({rank for rank, _ in found.events}))
    missing = sorted(set(range(min(world_size, 10**6))).difference(ranks))
    if missing:
        notes.append(f"start {name}: nothing from rank {_ranks_text(missing)} of {world_size}")
    clock = found.headers.get(0, {}).get("host")
    ahead = {rank: _ahead_s(header, clock) for rank, header in found.headers.items()}
    off = [rank for rank, seconds in sorted(ahead.items()) if seconds]
    if off:
        worst = max(off, key=lambda rank: abs(ahead[rank]))
        notes.append(
            f"start {name}: clocks put right on {len(off)} rank(s), by up to {ahead[worst]:+.3f} s "
            f"(rank {worst})"
        )
    events = [
        dataclasses.replace(event, wall_s=event.wall_s - ahead[event.rank])
        if ahead.get(event.rank)
        else event
        for event in found.events.values()
    ]
    return Start(
        id=name,
        world_size=world_size,
        ranks=ranks,
        events=tuple(sorted(events, key=lambda e: (e.wall_s, e.rank))),
    )


def _ahead_s(header: Mapping[str, Any], host: Any) -> float:
    """Return how far a rank's clock is ahead of the coordinator's on ``host``, where it is known to be."""
    if host is not None and header.get("host") == host:
        return 0.0  # the same clock, however long the answer took
    ahead = header.get("clock_ahead_s")
    known = type(ahead) in (int, float) and MIN_OFFSET_S < abs(ahead or 0.0) < 1e9
    return float(ahead or 0.0) if known else 0.0


def _ranks_text(ranks: Iterable[int]) -> str:
    shown = [str(rank) for rank in ranks]
    return ", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")
