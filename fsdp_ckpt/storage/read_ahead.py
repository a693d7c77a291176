"""Data of a shard that is there, or on its way, before anyone has said what of it is wanted.

    read ahead   part | part | part ...      from the start, several at once
    plan known         stop: no further part
    fill(range)  wait for the parts that have begun, read the rest

Invariant: once :meth:`ReadAhead.close` has returned, nothing writes to the memory any more.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from fsdp_ckpt.storage.shard_io import cut_ranges
from fsdp_ckpt.storage.store import Store

__all__ = ["AtHand", "Held", "ReadAhead"]


class AtHand(Protocol):
    """Memory that has a shard's data, or is about to."""

    @property
    def data(self) -> memoryview:
        """The memory, as long as the data."""
        ...

    def fill(self, start: int, stop: int) -> None:
        """Return once the bytes [start, stop) of the data are there; they may be damaged."""
        ...


class Held:
    """Memory in which the data has been since it was saved.

    Args:
        data: The memory.
    """

    def __init__(self, data: memoryview) -> None:
        self.data = data

    def fill(self, start: int, stop: int) -> None:
        """Return: the bytes are there."""


class ReadAhead:
    """Reads a shard's data from its start on, until the first range of it is asked for.

    Args:
        store: Where from.
        key: The shard's key.
        data_offset: Start of the data in the file, in bytes.
        data: Memory for all of the data; nobody else changes it before :meth:`close`.
        block_bytes: Parts are multiples of it.
        num_threads: Reads in flight; by default as many as suit the store.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        data_offset: int,
        data: memoryview,
        *,
        block_bytes: int,
        num_threads: int | None = None,
    ) -> None:
        self.data = data
        self._store, self._key, self._data_offset = store, key, data_offset
        self._threads = ThreadPoolExecutor(num_threads or store.concurrency, "fsdp_ckpt-ahead")
        self._parts: list[tuple[int, int, Future[None]]] = [
            (start, stop, self._threads.submit(self._read, start, stop))
            for start, stop in cut_ranges([(0, len(data))], block_bytes)
        ]
        self._part_bytes = self._parts[0][1] if self._parts else 1
        self._is_reading = True
        self._stopping = threading.Lock()

    def _read(self, start: int, stop: int) -> None:
        self._store.read_into(self._key, self._data_offset + start, self.data[start:stop])

    def stop(self) -> None:
        """Begin no further part; when this returns, it is settled of each one whether it has begun."""
        with self._stopping:
            if self._is_reading:
                self._is_reading = False
                for _, _, part in reversed(self._parts):
                    part.cancel()

    def fill(self, start: int, stop: int) -> None:
        """Return once the bytes [start, stop) are there; what was not begun is read by this thread.

        Raises:
            StorageError: The store failed, now or ahead.
        """
        self.stop()
        size = self._part_bytes
        for first, last, part in self._parts[start // size : -(-stop // size)]:
            if part.cancelled():
                self._read(max(first, start), min(last, stop))
            else:
                part.result()

    def close(self) -> None:
        """Wait for what has begun; once more is fine."""
        self.stop()
        self._threads.shutdown()
