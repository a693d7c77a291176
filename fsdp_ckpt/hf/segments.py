"""Segments of a checkpoint's files, verified, in a fixed number of buffers that all threads share.

    plan:    expect the segments of the next windows       which of them will be needed again
    thread:  using(rank, segment) --free or oldest buffer--> read, verify --> copy out of it

A segment is some whole blocks of a file's data, long enough for a fast read.

Invariant: no byte is handed out whose digest was not checked, and no more memory is taken than the buffers. A
thread holds one segment at a time, so that with more buffers than threads there is always one to take.
"""

from __future__ import annotations

import mmap
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fsdp_ckpt.commit.checkpoint import Checkpoint
from fsdp_ckpt.commit.holdings import list_names, names_between
from fsdp_ckpt.plan.image import BLOCK_BYTES
from fsdp_ckpt.storage.shard_io import plan_reads

__all__ = ["SegmentKey", "SourceSegments"]

SegmentKey = tuple[int, int]  # rank whose file, number of the segment

SEGMENT_BYTES = 4 * 1024 * 1024  # reads of it are as fast as longer ones


@dataclass(slots=True)
class _Slot:
    """A buffer that holds a segment, or will."""

    buffer: memoryview
    num_users: int = 1
    is_ready: bool = False


class SourceSegments:
    """The source of a consolidation; any thread may use it.

    Args:
        checkpoint: Where from.
        buffer_bytes: Of all buffers together, unless that is less than a block for every file and thread.
        num_files: Files that are read side by side.
        num_threads: Threads that use it at a time.
    """

    def __init__(
        self, checkpoint: Checkpoint, *, buffer_bytes: int, num_files: int, num_threads: int
    ) -> None:
        self._checkpoint = checkpoint
        # Where a segment ends one thread's window and begins the next one's, each file has one that waits.
        num_buffers = num_files + 2 * num_threads
        num_blocks = min(buffer_bytes // num_buffers, SEGMENT_BYTES) // BLOCK_BYTES
        self.segment_bytes = max(num_blocks, 1) * BLOCK_BYTES
        num_buffers = max(num_buffers, buffer_bytes // self.segment_bytes)
        memory = memoryview(mmap.mmap(-1, num_buffers * self.segment_bytes))
        starts = range(0, len(memory), self.segment_bytes)
        self._free = [memory[at : at + self.segment_bytes] for at in starts]
        # Oldest first.
        self._slots: OrderedDict[SegmentKey, _Slot] = OrderedDict()
        self._expected: Counter[SegmentKey] = Counter()
        self._changed = threading.Condition()

    def expect(self, keys: Iterable[SegmentKey]) -> None:
        """Note that each of these segments will be used once more."""
        with self._changed:
            self._expected.update(list(keys))  # a mapping would be taken for counts

    @contextmanager
    def using(self, key: SegmentKey) -> Iterator[memoryview]:
        """Hand out a segment's bytes, for as long as the body runs.

        Raises:
            CorruptCheckpointError: Missing, short or damaged; names step, rank, file and tensors.
            StorageError: The store failed in a way that may pass.
        """
        slot, is_mine = self._take(key)
        try:
            if is_mine:
                self._fill(key, slot)
            yield slot.buffer
        finally:
            self._release(key, slot)

    def _take(self, key: SegmentKey) -> tuple[_Slot, bool]:
        """Return the segment's slot, and whether it is this thread's to fill."""
        with self._changed:
            while True:
                slot = self._slots.get(key)
                if slot is not None and slot.is_ready:
                    slot.num_users += 1
                    return slot, False
                if slot is None and (buffer := self._find_buffer()) is not None:
                    self._slots[key] = slot = _Slot(buffer)
                    return slot, True
                self._changed.wait()

    def _find_buffer(self) -> memoryview | None:
        """Return a buffer that no thread uses: a free one, or the oldest of those that wait."""
        if self._free:
            return self._free.pop()
        idle = [key for key, slot in self._slots.items() if not slot.num_users]
        if not idle:
            return None
        return self._slots.pop(idle[0]).buffer

    def _fill(self, key: SegmentKey, slot: _Slot) -> None:
        try:
            self._read(key, slot.buffer)
        except BaseException:
            with self._changed:
                del self._slots[key]
                self._free.append(slot.buffer)
                self._changed.notify_all()
            raise
        with self._changed:
            slot.is_ready = True
            self._changed.notify_all()

    def _read(self, key: SegmentKey, buffer: memoryview) -> None:
        rank, segment = key
        file, header = self._checkpoint.manifest.files[rank], self._checkpoint.header(rank)
        start = segment * self.segment_bytes
        calls = plan_reads(
            self._checkpoint.store,
            file.name,
            [(start, min(start + self.segment_bytes, header.layout.data_bytes))],
            buffer,
            data_offset=file.data_offset,
            block_bytes=BLOCK_BYTES,
            digests=header.digests,
            explain=lambda first, last: list_names(names_between(header, first, last)),
            origin=start,
        )
        with self._checkpoint.reading(rank):
            for call in calls:
                call()

    def _release(self, key: SegmentKey, slot: _Slot) -> None:
        with self._changed:
            slot.num_users -= 1
            self._expected[key] -= 1
            if self._expected[key] <= 0:
                del self._expected[key]
                if not slot.num_users and self._slots.get(key) is slot:
                    del self._slots[key]
                    self._free.append(slot.buffer)
            self._changed.notify_all()
