"""From the tensors that are wanted to the segments of the checkpoint's files that hold them.

    wanted box --layout--> chunks of ranks --header--> bytes of a file --> parts, each inside one segment

Invariant: every wanted element is in exactly one part. A part is a box, so copying it is one strided
assignment, whatever the sharding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from fsdp_ckpt.commit.checkpoint import Checkpoint, Piece
from fsdp_ckpt.hf.cast import Bits, bits_dtype, cast
from fsdp_ckpt.hf.segments import SegmentKey
from fsdp_ckpt.manifest.schema import TensorRow
from fsdp_ckpt.plan.box import Box, byte_span, overlap, relative_slices
from fsdp_ckpt.plan.dtypes import itemsize
from fsdp_ckpt.plan.flat import flat_range_boxes
from fsdp_ckpt.plan.image import Entry

__all__ = ["Fill", "Want", "check_headers", "copy_parts", "plan_fill"]


@dataclass(frozen=True, slots=True)
class Want:
    """A box of a tensor, and where its elements go, row-major.

    Args:
        name: Of the tensor in the output.
        row: The tensor in the checkpoint.
        box: Which part of it; not empty.
        dtype: What it becomes.
        byte_offset: Start within the buffer that is filled, in bytes.
    """

    name: str
    row: TensorRow
    box: Box
    dtype: str
    byte_offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes in the buffer."""
        return self.box.num_elements * itemsize(self.dtype)

    def target(self, buffer: memoryview) -> Bits:
        """Return its place in the buffer, shape ``box.sizes``."""
        place = buffer[self.byte_offset : self.byte_offset + self.num_bytes]
        return np.frombuffer(place, bits_dtype(self.dtype)).reshape(self.box.sizes)


@dataclass(frozen=True, slots=True)
class _Part:
    """What one segment holds of a want.

    Args:
        want: Whose part.
        entry: The chunk that it belongs to.
        run: Consecutive elements of the chunk that lie in the segment, as a box of the tensor.
        byte_offset: Start of ``run`` in the segment, in bytes.
        box: Those of them that are wanted.
    """

    want: Want
    entry: Entry
    run: Box
    byte_offset: int
    box: Box

    def elements(self, segment: memoryview) -> Bits:
        """Return the wanted elements, a view of the segment."""
        bits = bits_dtype(self.entry.dtype)
        run = np.frombuffer(segment, bits, self.run.num_elements, self.byte_offset)
        return run.reshape(self.run.sizes)[relative_slices(self.box, self.run)]


Fill = Mapping[SegmentKey, Sequence[_Part]]


def check_headers(checkpoint: Checkpoint, ranks: Iterable[int], num_threads: int) -> None:
    """Prove that the files of ``ranks`` have whole headers; reads no data.

    Raises:
        CorruptCheckpointError: One is missing, short or damaged.
    """
    with ThreadPoolExecutor(num_threads, "fsdp_ckpt-headers") as threads:
        for _ in threads.map(checkpoint.header, ranks):
            pass


def plan_fill(checkpoint: Checkpoint, wants: Iterable[Want], segment_bytes: int) -> Fill:
    """Find the segments that hold what is wanted, in the order of the first use.

    Raises:
        CorruptCheckpointError: A file's header is damaged, or lacks a chunk.
    """
    fill: dict[SegmentKey, list[_Part]] = {}
    for want in wants:
        num_found = 0
        for piece in checkpoint.file_pieces(want.row, want.box):
            for segment, part in _parts(checkpoint, want, piece, segment_bytes):
                fill.setdefault((piece.rank, segment), []).append(part)
                num_found += part.box.num_elements
        if num_found != want.box.num_elements:
            raise AssertionError(f"{want.name}: {num_found} elements for {want.box}")
    return fill


def _parts(
    checkpoint: Checkpoint, want: Want, piece: Piece, segment_bytes: int
) -> Iterator[tuple[int, _Part]]:
    """Yield a piece's parts, each with the number of its segment."""
    entry = piece.entry
    size = itemsize(entry.dtype)
    if (
        entry.byte_offset % size
    ):  # no writer of the format does it; an element could lie in two segments
        raise checkpoint.damaged(piece.rank, f"{entry.key} does not start at a whole element")
    first, last = byte_span(piece.region, entry.box, size)
    at = first
    while at < last:
        segment, byte_offset = divmod(entry.byte_offset + at, segment_bytes)
        stop = min(last, at + segment_bytes - byte_offset)
        for inner in flat_range_boxes(entry.box.sizes, at // size, stop // size):
            offsets = tuple(a + b for a, b in zip(entry.box.offsets, inner.offsets, strict=True))
            run = Box(offsets, inner.sizes)
            box = overlap(run, piece.region)
            if box is not None:
                yield segment, _Part(want, entry, run, byte_offset, box)
            byte_offset += inner.num_elements * size
        at = stop


def copy_parts(parts: Sequence[_Part], segment: memoryview, buffer: memoryview) -> dict[str, int]:
    """Copy what one segment holds to its places in ``buffer``, converted.

    Returns:
        Name → how many finite numbers became infinite, where any did.
    """
    overflows: dict[str, int] = {}
    for part in parts:
        want = part.want
        bits, num_infinite = cast(part.elements(segment), part.entry.dtype, want.dtype)
        want.target(buffer)[relative_slices(part.box, want.box)] = bits
        if num_infinite:
            overflows[want.name] = overflows.get(want.name, 0) + num_infinite
    return overflows
