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
    "blocks_of",
    "coalesce_blocks",
]

PAGE_BYTES = 4096
Chunk: TypeAlias = tuple[str, str, tuple[int, ...], Box]  # name, dtype, global shape, box

BLOCK_BYTES = 4 * 1024 * 1024  # one digest each: the unit of a verified read


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


def blocks_of(start: int, stop: int) -> range:
    """Return the blocks that hold the bytes [start, stop) of the data."""
    return range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES))


def coalesce_blocks(blocks: Iterable[int], data_bytes: int) -> Iterator[tuple[int, int]]:
    """Merge blocks into the fewest half-open byte ranges of the data, in order."""
    start = stop = -1
    for block in sorted(set(blocks)):
        if block != stop:
            if stop > start:
                yield start * BLOCK_BYTES, stop * BLOCK_BYTES
            start = block
        stop = block + 1
    if stop > start:
        yield start * BLOCK_BYTES, min(stop * BLOCK_BYTES, data_bytes)
