"""Data of a shard that is there, or on its way, while other threads verify and use what has come.

    Reading     ranges of it, in order, several parts at once; all of it, until someone says which are wanted
    Held        all of it, from a save

Who reads waits for the storage alone, who verifies for the processor alone: where each did both in turn, they
came to do the same thing at the same time, and either stood idle.

Invariant: once the threads of a :class:`Reading` have ended, nothing writes to its memory any more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from typing import NamedTuple, Protocol

from fsdp_ckpt.storage.shard_io import cut_ranges
from fsdp_ckpt.storage.store import Store

__all__ = ["AtHand", "Held", "Reading"]

Range = tuple[int, int]  # bytes of a shard's data, half-open


class AtHand(Protocol):
    """Memory that has a shard's data, or is about to."""

    @property
    def data(self) -> memoryview:
        """The memory."""
        ...

    def want(self, ranges: Sequence[Range]) -> None:
        """Say which bytes will be asked for: whole blocks, ascending, apart from each other."""
        ...

    def fill(self, start: int, stop: int) -> None:
        """Return once the bytes [start, stop) of the data are there; they may be damaged. From any thread."""
        ...


class Held:
    """Memory in which the data has been since it was saved.

    Args:
        data: The memory.
    """

    def __init__(self, data: memoryview) -> None:
        self.data = data

    def want(self, ranges: Sequence[Range]) -> None:
        """Nothing is to be done."""

    def fill(self, start: int, stop: int) -> None:
        """Return: the bytes are there."""


class _Part(NamedTuple):
    start: int
    stop: int
    read: Future[None]


class Reading:
    """Reads ranges of a shard's data.

    Args:
        store: Where from.
        key: The shard's key.
        data_offset: Start of the data in the file, in bytes.
        data: Memory for the data from ``origin`` on; only what is read is touched.
        block_bytes: Ranges are cut at multiples of it.
        threads: Those that read.
        origin: Byte of the data with which the memory begins.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        data_offset: int,
        data: memoryview,
        *,
        block_bytes: int,
        threads: Executor,
        origin: int = 0,
    ) -> None:
        self.data = data
        self._store, self._key, self._data_offset = store, key, data_offset
        self._block_bytes, self._origin = block_bytes, origin
        self._threads = threads
        self._parts: list[_Part] = []

    def want(self, ranges: Sequence[Range]) -> None:
        """Read these ranges, and of those of an earlier call no more than has begun."""
        # From the end on: the threads go the other way.
        kept = [
            part
            for part in reversed(self._parts)
            if _is_within(part, ranges) or not part.read.cancel()
        ]
        kept.reverse()
        missing = cut_ranges(_outside(ranges, kept), self._block_bytes, self._store.read_bytes)
        begun = [_Part(a, b, self._threads.submit(self._read, a, b)) for a, b in missing]
        self._parts = sorted([*kept, *begun], key=lambda part: part.start)

    def _read(self, start: int, stop: int) -> None:
        part = self.data[start - self._origin : stop - self._origin]
        self._store.read_into(self._key, self._data_offset + start, part)

    def fill(self, start: int, stop: int) -> None:
        """Wait for wanted bytes.

        Raises:
            StorageError: The store failed, or the file is too short.
        """
        first = max(bisect_right(self._parts, start, key=lambda part: part.start) - 1, 0)
        for part in self._parts[first:]:
            if part.start >= stop:
                break
            if part.stop > start:
                part.read.result()


def _is_within(part: _Part, ranges: Sequence[Range]) -> bool:
    """Whether one of the ranges, ascending, has all of the part."""
    at = bisect_right(ranges, part.start, key=lambda r: r[0]) - 1
    return at >= 0 and part.stop <= ranges[at][1]


def _outside(ranges: Iterable[Range], parts: Sequence[_Part]) -> Iterator[Range]:
    """Yield what of the ranges no part has; both ascending, and apart from each other."""
    for start, stop in ranges:
        at = max(bisect_right(parts, start, key=lambda part: part.start) - 1, 0)
        for part in parts[at:]:
            if part.start >= stop:
                break
            if start < part.start:
                yield start, part.start
            start = max(start, part.stop)
        if start < stop:
            yield start, stop
