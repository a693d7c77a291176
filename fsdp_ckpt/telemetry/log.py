"""Lines of one rank, in whole objects: the same on a disk and in a bucket.

    rank-00000-000001.jsonl   full, never touched again
    rank-00000-000007.jsonl   the rest so far; the next flush writes a longer one and then deletes this one

No store can append in general, and an object per flush would leave thousands. So the last object is written
anew with each flush, under a new name, up to ``CHUNK_BYTES``. A crash between writing and deleting leaves
lines twice; their numbers tell.

Invariant: what is on storage is whole lines; what is in memory and on storage is bounded.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from typing import Any

from fsdp_ckpt.errors import CheckpointError
from fsdp_ckpt.storage.store import Store
from fsdp_ckpt.telemetry.event import Event

__all__ = ["CHUNK_BYTES", "TelemetryLog", "object_name"]

CHUNK_BYTES = 256 * 1024
# Of lines that a store which fails leaves in memory.
MAX_TAIL_BYTES = 8 * CHUNK_BYTES
MAX_LINE_BYTES = 16 * 1024


def object_name(rank: int, number: int) -> str:
    """Return the name of a rank's ``number``-th object of one start."""
    return f"rank-{rank:05d}-{number:06d}.jsonl"


class TelemetryLog:
    """Writes the lines of one rank and one start; used by one thread.

    Args:
        store: The start's folder.
        rank: This rank.
        header: First line of every object.
        max_bytes: Of all objects together.
    """

    def __init__(self, store: Store, rank: int, header: Mapping[str, Any], max_bytes: int) -> None:
        self._store = store
        self._rank = rank
        self._header = json.dumps(header, separators=(",", ":"))
        self._max_bytes = max_bytes
        self._tail: deque[str] = deque()
        self._tail_bytes = 0
        self._is_new = False
        self._num_events = self._num_objects = 0
        self._full: deque[tuple[str, int]] = deque()  # name, bytes
        self._to_delete: list[str] = []
        self._newest: str | None = None  # holds the tail as of the last flush

    @property
    def has_new(self) -> bool:
        """Whether there are lines that are not on storage."""
        return self._is_new

    def add(self, event: Event) -> None:
        """Take a line; it is on storage after the next :meth:`flush`."""
        self._num_events += 1
        line = event.to_line(self._num_events)
        if len(line) > MAX_LINE_BYTES:
            return
        self._tail.append(line)
        self._tail_bytes += len(line) + 1
        self._is_new = True
        while self._tail_bytes > MAX_TAIL_BYTES:
            self._tail_bytes -= len(self._tail.popleft()) + 1

    def flush(self) -> None:
        """Put what is new on storage.

        Raises:
            CheckpointError: The store failed; the lines go with the next flush.
        """
        if not self._is_new:
            return
        data = "".join(f"{line}\n" for line in (self._header, *self._tail)).encode()
        self._num_objects += 1
        name = object_name(self._rank, self._num_objects)
        self._store.create(name, data)
        self._is_new = False
        if self._newest is not None:
            self._to_delete.append(self._newest)
        self._newest = name
        if len(data) >= CHUNK_BYTES:
            self._full.append((name, len(data)))
            self._newest, self._tail_bytes = None, 0
            self._tail.clear()
        while self._full and sum(size for _, size in self._full) > self._max_bytes - CHUNK_BYTES:
            self._to_delete.append(self._full.popleft()[0])
        self._delete()

    def _delete(self) -> None:
        while self._to_delete:
            try:
                self._store.delete(self._to_delete[-1])
            except CheckpointError:
                return  # its lines stand elsewhere too; tried again at the next flush
            self._to_delete.pop()
