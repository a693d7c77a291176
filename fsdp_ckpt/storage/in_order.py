"""Consecutive ranges of any length, to any writer.

    write_at: any lengths, in order --> collected where a part is not whole --> parts, several at a time

Invariant: at most one part is held beyond what the caller passes.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from fsdp_ckpt.errors import StorageError
from fsdp_ckpt.storage.store import ObjectWriter

__all__ = ["InOrderWriter"]

PIECE_BYTES = 32 * 1024 * 1024


class InOrderWriter:
    """An :class:`ObjectWriter` for consecutive ranges, over one that may want parts.

    Args:
        writer: Any; owned by this one, which commits or aborts it.
        num_bytes: Size of the object.
        num_threads: Writes in flight, where ``writer`` takes them in any order.
    """

    ordered = True
    part_bytes = 0

    def __init__(self, writer: ObjectWriter, num_bytes: int, num_threads: int = 1) -> None:
        self._writer = writer
        self._num_bytes = num_bytes
        self._num_threads = 1 if writer.ordered else num_threads
        # Made when first needed: a caller whose ranges are whole parts needs none.
        self._part = bytearray()
        self._held = 0
        self._position = 0

    def write_at(self, byte_offset: int, data: memoryview) -> None:
        """Write the next bytes; what does not fill a part is kept until the next call, or the end."""
        if byte_offset != self._position or len(data) > self._num_bytes - byte_offset:
            raise StorageError(
                f"{len(data)} bytes at byte {byte_offset} of {self._num_bytes}: out of order, "
                f"byte {self._position} expected"
            )
        self._position += len(data)
        size = self._writer.part_bytes
        if not size:
            self._put(byte_offset, data, PIECE_BYTES)
            return
        if self._held:
            data = self._hold(data)
            if self._held == size or self._position == self._num_bytes:
                self._put_held(self._position - len(data))
        at = self._position - len(data)
        is_end = self._position == self._num_bytes
        whole = len(data) if is_end else len(data) // size * size
        self._put(at, data[:whole], size)
        self._hold(data[whole:])

    def _hold(self, data: memoryview) -> memoryview:
        """Keep what the part at hand still takes; return the rest."""
        size = self._writer.part_bytes
        if data and not self._part:
            self._part = bytearray(min(size, self._num_bytes))
        count = min(len(data), size - self._held)
        self._part[self._held : self._held + count] = data[:count]
        self._held += count
        return data[count:]

    def _put_held(self, stop: int) -> None:
        with memoryview(self._part) as part:
            self._writer.write_at(stop - self._held, part[: self._held])
        self._held = 0

    def _put(self, byte_offset: int, data: memoryview, size: int) -> None:
        """Write consecutive pieces of ``size`` bytes."""

        def put(start: int) -> None:
            self._writer.write_at(byte_offset + start, data[start : start + size])

        starts = range(0, len(data), size)
        if self._num_threads == 1 or len(starts) == 1:
            for start in starts:
                put(start)
            return
        with ThreadPoolExecutor(self._num_threads, "fsdp_ckpt-put") as threads:
            for _ in threads.map(put, starts):
                pass

    def flush(self) -> None:
        """Flush the writer; what does not fill a part yet is not with it."""
        self._writer.flush()

    def commit(self) -> None:
        """Commit the writer.

        Raises:
            StorageError: Bytes are missing.
        """
        if self._position != self._num_bytes:
            raise StorageError(f"{self._position} of {self._num_bytes} bytes written")
        self._writer.commit()

    def abort(self) -> None:
        """Abort the writer."""
        self._writer.abort()
