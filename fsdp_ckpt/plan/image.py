"""Where a rank's chunks lie in its image, which is its shard file.

    0              data_offset (a multiple of 4096)                        num_bytes
    | header ..... | entry | entry | entry | ............................. |

Entries are packed without gaps, as the safetensors format demands, widest dtype first, so that each is
aligned to its own element size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from fsdp_ckpt.plan.box import Box
from fsdp_ckpt.plan.dtypes import itemsize

__all__ = [
    "BLOCK_BYTES",
    "PAGE_BYTES",
    "Chunk",
    "Entry",
    "ImageLayout",
    "coalesce_ranges",
    "whole_blocks",
]

PAGE_BYTES = 4096
Chunk: TypeAlias = tuple[str, str, tuple[int, ...], Box]  # name, dtype, global shape, box

# One digest each: the unit of a verified read. Of smaller ones there would be more digests than the few per
# mille of a header; larger ones would be read for the sake of a few rows on another world size.
BLOCK_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One chunk in an image.

    Args:
        key: Name in the safetensors header, unique in the file.
        name: Tensor's name.
        dtype: Name of format version 1.
        shape: Global shape of the tensor.
        box: The chunk.
        byte_offset: Start within the data, in bytes.
    """

    key: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    byte_offset: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the chunk."""
        return self.box.num_elements * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """Entries in their order in the file, with offsets, and the bytes they take together."""

    entries: tuple[Entry, ...]
    data_bytes: int

    @classmethod
    def pack(cls, chunks: Iterable[Chunk]) -> ImageLayout:
        """Lay out (name, dtype, shape, box) chunks.

        Several chunks of one tensor get the keys ``name``, ``name#1``, ``name#2`` ...
        """
        ordered = sorted(chunks, key=lambda chunk: -itemsize(chunk[1]))
        names = {name for name, *_ in ordered}
        entries: list[Entry] = []
        keys = {"__metadata__"}  # not a tensor's key in a safetensors header
        byte_offset = 0
        for name, dtype, shape, box in ordered:
            key, copies = name, 0
            # ``name#1`` may be another tensor's own name.
            while key in keys or (key != name and key in names):
                copies += 1
                key = f"{name}#{copies}"
            keys.add(key)
            entry = Entry(
                key=key, name=name, dtype=dtype, shape=shape, box=box, byte_offset=byte_offset
            )
            entries.append(entry)
            byte_offset += entry.num_bytes
        return cls(tuple(entries), byte_offset)

    @property
    def num_blocks(self) -> int:
        """Number of digests."""
        return -(-self.data_bytes // BLOCK_BYTES)


def whole_blocks(start: int, stop: int, data_bytes: int) -> tuple[int, int]:
    """Return the bytes of the blocks that hold the bytes [start, stop) of the data."""
    return start // BLOCK_BYTES * BLOCK_BYTES, min(
        -(-stop // BLOCK_BYTES) * BLOCK_BYTES, data_bytes
    )


def coalesce_ranges(
    ranges: Iterable[tuple[int, int]], gap_bytes: int = 0
) -> Iterator[tuple[int, int]]:
    """Merge half-open byte ranges that overlap or touch, or have ``gap_bytes`` or less between them."""
    start = stop = -1
    for first, last in sorted(r for r in ranges if r[0] < r[1]):
        if start < 0 or first > stop + gap_bytes:
            if stop > start:
                yield start, stop
            start, stop = first, last
        stop = max(stop, last)
    if stop > start:
        yield start, stop
