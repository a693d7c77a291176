"""One start of the job: its id and the ranks' clocks, agreed on once, before the first event."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from typing import Any, Protocol

from fsdp_ckpt.storage.store import Store
from fsdp_ckpt.telemetry.event import FORMAT, URGENT, VERSION, Event
from fsdp_ckpt.telemetry.log import TelemetryLog
from fsdp_ckpt.telemetry.options import TelemetryOptions
from fsdp_ckpt.telemetry.outlet import Outlet
from fsdp_ckpt.telemetry.tracing import OFF, Telemetry
from fsdp_ckpt.version import __version__

__all__ = ["FOLDER", "start_telemetry"]

# Under the root; no step's folder has such a name.
FOLDER = "telemetry"


class Ranks(Protocol):
    """What is needed of a group of ranks."""

    rank: int
    world_size: int

    def decide(
        self, what: str, action: Callable[[], Any], combine: Callable[[list[Any]], Any]
    ) -> Any: ...


def start_telemetry(
    root: Store,
    group: Ranks,
    new_id: Callable[[], str],
    options: TelemetryOptions | None,
    on_event: Callable[[Event], None] | None,
) -> Telemetry:
    """Return what to tell of this start; with options, called by every rank, an exchange.

    Args:
        root: The run's root; ``telemetry/<start>/`` under it gets this rank's lines.
        group: The ranks.
        new_id: Makes ids that sort by time.
        options: What to write; ``None``: nothing.
        on_event: Called with each event of this rank, on a thread of its own.
    """
    if options is None and on_event is None:
        return OFF
    log, prepare = None, None
    if options is not None:
        folder = root.child(FOLDER)
        header = _agree_on_start(group, new_id)
        start, is_first = header["start"], group.rank == 0
        log = TelemetryLog(folder.child(start), group.rank, header, options.max_bytes)
        if is_first:
            num_kept = options.max_starts - 1

            def prepare() -> None:
                _delete_old_starts(folder, num_kept, start)

    urgent = URGENT | {"save.committed"} if group.rank == 0 else URGENT
    kept = options or TelemetryOptions()
    outlet = Outlet(log, on_event, flush_s=kept.flush_s, is_urgent=urgent, prepare=prepare)
    telemetry = Telemetry(
        outlet.put,
        rank=group.rank,
        progress_s=kept.progress_s if group.rank == 0 else None,
        close=outlet.close,
    )
    telemetry.event("run.started", world_size=group.world_size)
    return telemetry


def _agree_on_start(group: Ranks, new_id: Callable[[], str]) -> dict[str, Any]:
    """Return the first line of this rank's objects, with how far its clock is off the coordinator's.

    The coordinator answers when all have come, with its time. It was answered between this rank's question
    and its hearing the answer, and only a moment before the latter.
    """
    asked_s = time.time()
    answer = group.decide(
        "starting telemetry", int, lambda _: {"start": new_id(), "wall_s": time.time()}
    )
    heard_s = time.time()
    is_first = group.rank == 0
    return {
        "format": FORMAT,
        "version": VERSION,
        "start": answer["start"],
        "rank": group.rank,
        "world_size": group.world_size,
        "host": platform.node(),
        "pid": os.getpid(),
        "library": __version__,
        "wall_s": heard_s,
        "monotonic_s": time.monotonic(),
        # At most so much ahead, and at least asked_s - wall_s.
        "clock_ahead_s": 0.0 if is_first else heard_s - answer["wall_s"],
        "clock_ahead_at_least_s": 0.0 if is_first else asked_s - answer["wall_s"],
    }


def _delete_old_starts(folder: Store, num_kept: int, start: str) -> None:
    older = [name for name in folder.list_folders() if name < start]
    for name in older[: len(older) - num_kept] if num_kept < len(older) else []:
        store = folder.child(name)
        for key in store.list_files():
            if key.startswith("rank-") and key.endswith(".jsonl"):
                store.delete(key)
