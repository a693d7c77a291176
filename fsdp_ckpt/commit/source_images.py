"""What was read of a checkpoint: parts of files in one buffer, as they lie there, and pieces of chunks."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fsdp_ckpt.errors import StorageError
from fsdp_ckpt.plan.box import Box, byte_span, relative_slices
from fsdp_ckpt.plan.dtypes import itemsize
from fsdp_ckpt.plan.image import Entry, whole_blocks

__all__ = ["INLINE", "Piece", "SourceImages", "Span", "allocate_sparsely", "reserve"]

INLINE = -1
# Address space for a whole file, memory for the blocks that are read. Python 3.11 has no
# name for MAP_NORESERVE.
_SPARSE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one stored chunk.

    Args:
        rank: Whose file, or ``INLINE`` for the manifest.
        entry: The chunk.
        region: Which part of it, global coordinates; not empty.
    """

    rank: int
    entry: Entry
    region: Box

    @property
    def byte_range(self) -> tuple[int, int]:
        """The bytes of the file's data from the piece's first to its last, half-open."""
        entry = self.entry
        start, stop = byte_span(self.region, entry.box, itemsize(entry.dtype))
        return entry.byte_offset + start, entry.byte_offset + stop


class SourceImages:
    """What was read: parts of files, as they lie there, in one buffer. Keeps the buffer alive.

    Args:
        buffers: Rank → (byte of the file's data with which its part begins, the part).
    """

    def __init__(self, buffers: Mapping[int, tuple[int, memoryview]]) -> None:
        self._buffers = buffers

    def array(self, piece: Piece) -> np.ndarray:
        """Return the piece's bytes, shape (*region.sizes, itemsize), uint8, strided over the buffer."""
        entry = piece.entry
        origin, buffer = self._buffers[piece.rank]
        start = entry.byte_offset - origin
        data = np.frombuffer(buffer, np.uint8)[start : start + entry.num_bytes]
        chunk = data.reshape(*entry.box.sizes, itemsize(entry.dtype))
        return chunk[relative_slices(piece.region, entry.box)]


class Span:
    """What is wanted of one file, and the part of its data that holds it and whole entries.

    Args:
        data_bytes: Of the file's data.
    """

    def __init__(self, data_bytes: int) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.start = 2**62
        self.stop = 0
        self._data_bytes = data_bytes

    def add(self, start: int, stop: int, entry: Entry) -> None:
        """Add the bytes [start, stop) of the data, a part of ``entry``."""
        first, last = whole_blocks(start, stop, self._data_bytes)
        self.ranges.append((first, last))
        self.start = min(self.start, whole_blocks(entry.byte_offset, stop, self._data_bytes)[0])
        self.stop = max(self.stop, last, entry.byte_offset + entry.num_bytes)


def reserve(num_bytes: int) -> mmap.mmap:
    """Return a buffer that takes memory only where it is written to, however long a file claims to be.

    Raises:
        StorageError: There is not even the address space.
    """
    try:
        return mmap.mmap(-1, max(num_bytes, 1), flags=_SPARSE)
    except (OSError, OverflowError) as e:
        raise StorageError(f"no address space for {num_bytes} bytes of a shard: {e}") from e


def allocate_sparsely(num_bytes: int) -> memoryview:
    """Return :func:`reserve` as a view."""
    return memoryview(reserve(num_bytes))
