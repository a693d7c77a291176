"""Layouts of flattened tensors: FSDP1's flat parameters, ZeRO's partitions.

Several tensors are flattened one after the other, padded, and cut into equal shards without regard to rows:

    | first .............. | second ............................ | third .. | pad |
    |      shard 0      |      shard 1      |      shard 2      |      shard 3      |

What a shard holds of one tensor is a range of its row-major elements, and that is a few boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fsdp_ckpt.errors import CorruptCheckpointError
from fsdp_ckpt.plan.box import Box, byte_span, overlap
from fsdp_ckpt.plan.chunks import Chunks, Ints
from fsdp_ckpt.plan.mesh import Mesh

__all__ = ["FlatLayout", "flat_range_boxes"]


@dataclass(frozen=True)
class FlatLayout:
    """A tensor's place in a flat group that is cut into equal shards.

    Args:
        mesh: Shape (replicas, shards): each row of ranks holds the whole group once.
        shard_elements: Elements per shard.
        start: Where the tensor begins in the flat group, in elements.
    """

    mesh: Mesh
    shard_elements: int
    start: int = 0

    def __post_init__(self) -> None:
        if len(self.mesh.shape) != 2 or self.shard_elements < 1 or self.start < 0:
            raise CorruptCheckpointError(
                f"flat layout of {self.shard_elements} elements per shard at {self.start} on a mesh of "
                f"shape {self.mesh.shape}"
            )

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank that may hold a part."""
        return self.mesh.ranks

    @property
    def max_rank(self) -> int:
        """The highest of them."""
        return self.mesh.max_rank

    @property
    def num_replicas(self) -> int:
        """How many ranks hold each element."""
        return self.mesh.shape[0]

    @cached_property
    def replica_ranks(self) -> Ints:
        """Ranks by replica, shape (num_replicas, shards)."""
        return np.array(self.mesh.ranks, np.int64).reshape(self.mesh.shape)

    def replica_of(self, rank: int) -> int | None:
        """Return which replica ``rank`` belongs to, or ``None`` outside the mesh."""
        position = self.mesh.positions.get(rank)
        return None if position is None else position // self.mesh.shape[1]

    def range_of(self, shape: tuple[int, ...], rank: int) -> tuple[int, int]:
        """Return the half-open range of the tensor's row-major elements that ``rank`` holds."""
        position = self.mesh.positions.get(rank)
        if position is None:
            return 0, 0
        return self._range(position % self.mesh.shape[1], math.prod(shape))

    def _range(self, shard: int, num_elements: int) -> tuple[int, int]:
        low = min(max(shard * self.shard_elements - self.start, 0), num_elements)
        high = min(max((shard + 1) * self.shard_elements - self.start, 0), num_elements)
        return low, high

    def boxes_of(self, shape: tuple[int, ...], rank: int) -> list[Box]:
        """Return the boxes that ``rank`` holds, in the order of their elements."""
        return list(flat_range_boxes(shape, *self.range_of(shape, rank)))

    def overlapping(
        self, shape: tuple[int, ...], replica: int, wanted: Box
    ) -> list[tuple[int, Box]]:
        """Return (rank, chunk) for every chunk of one replica that shares an element with ``wanted``."""
        if not wanted.num_elements:
            return []
        low, high = byte_span(wanted, Box.whole(shape), 1)
        return [
            (rank, box)
            for rank, box in self._chunks(shape, replica, low, high)
            if overlap(box, wanted) is not None
        ]

    def chunks(self, shape: tuple[int, ...], replica: int) -> Chunks:
        """Return every chunk, held by the ranks of one replica."""
        return Chunks.of(self._chunks(shape, replica, 0, math.prod(shape)), len(shape))

    def _chunks(
        self, shape: tuple[int, ...], replica: int, low: int, high: int
    ) -> Iterator[tuple[int, Box]]:
        """Yield (rank, box) of the shards that hold an element of [low, high)."""
        num_elements = math.prod(shape)
        if low >= high:
            return
        first = (self.start + low) // self.shard_elements
        last = (self.start + high - 1) // self.shard_elements
        for shard in range(first, last + 1):
            rank = int(self.replica_ranks[replica, shard])
            for box in flat_range_boxes(shape, *self._range(shard, num_elements)):
                yield rank, box


def flat_range_boxes(shape: tuple[int, ...], low: int, high: int) -> Iterator[Box]:
    """Cut a range of row-major elements into boxes, in order.

    Args:
        shape: The tensor's.
        low: First element, 0 <= low <= high.
        high: One past the last element, at most the tensor's number of elements.

    Yields:
        At most ``2 * ndim - 1`` boxes, each of contiguous elements.

    Source: the rest of the first row, whole rows, the start of the last row; the partial rows recursively.
    """
    if low >= high:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = low // row, (high - 1) // row
    if first == last and high - low < row:
        yield from _in_row(shape, first, low, high)
        return
    whole_from, whole_to = -(-low // row), high // row
    if low < whole_from * row:
        yield from _in_row(shape, first, low, whole_from * row)
    if whole_from < whole_to:
        zeros = (0,) * (len(shape) - 1)
        yield Box((whole_from, *zeros), (whole_to - whole_from, *shape[1:]))
    if whole_to * row < high:
        yield from _in_row(shape, whole_to, whole_to * row, high)


def _in_row(shape: tuple[int, ...], i: int, low: int, high: int) -> Iterator[Box]:
    row = math.prod(shape[1:])
    for box in flat_range_boxes(shape[1:], low - i * row, high - i * row):
        yield Box((i, *box.offsets), (1, *box.sizes))
