"""Layouts: rules from which every chunk of every rank is computed.

Invariant: a layout and a shape determine, on any machine, the same disjoint boxes that together cover the
tensor. So the manifest names a tensor's layout and never lists a regular chunk.

    MeshLayout      a device mesh and one placement per mesh axis (FSDP2, HSDP, TP, plain replication)
    FlatLayout      a place in a flat group cut into equal shards (FSDP1, ZeRO)
    ListedLayout    chunks listed outright (foreign planners, one owner, irregular shardings)

Each tells which boxes a rank holds, which chunks meet a box, and which ranks hold the same (replicas).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from fsdp_ckpt.plan.box import Box, overlap
from fsdp_ckpt.plan.chunks import Chunks
from fsdp_ckpt.plan.flat import FlatLayout
from fsdp_ckpt.plan.mesh import Mesh, MeshLayout, Placement

__all__ = ["Chunks", "FlatLayout", "Layout", "ListedLayout", "Mesh", "MeshLayout", "Placement"]


@dataclass(frozen=True)
class ListedLayout:
    """Chunks listed outright.

    Args:
        listed: (rank, box) per chunk; boxes are not empty.
    """

    listed: tuple[tuple[int, Box], ...]
    num_replicas: int = 1

    @classmethod
    def of(cls, listed: Iterable[tuple[int, Box]]) -> ListedLayout:
        """Build the layout, leaving out empty chunks."""
        return cls(tuple((rank, box) for rank, box in listed if box.num_elements))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank that holds a part."""
        return tuple(dict.fromkeys(rank for rank, _ in self.listed))

    @property
    def max_rank(self) -> int:
        """The highest of them; 0 where there is none."""
        return max(self.ranks, default=0)

    def replica_of(self, rank: int) -> int | None:
        """Return 0 for a rank that holds a part, ``None`` for any other."""
        return 0 if rank in self.ranks else None

    def boxes_of(self, shape: tuple[int, ...], rank: int) -> list[Box]:
        """Return the boxes that ``rank`` holds."""
        return [box for holder, box in self.listed if holder == rank]

    def overlapping(
        self, shape: tuple[int, ...], replica: int, wanted: Box
    ) -> list[tuple[int, Box]]:
        """Return (rank, chunk) for every chunk that shares an element with ``wanted``."""
        return [(rank, box) for rank, box in self.listed if overlap(box, wanted) is not None]

    def chunks(self, shape: tuple[int, ...], replica: int) -> Chunks:
        """Return every chunk; there is one replica only."""
        return Chunks.of(self.listed, len(shape))


Layout: TypeAlias = MeshLayout | FlatLayout | ListedLayout
