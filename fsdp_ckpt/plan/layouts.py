"""Layouts: rules from which every chunk of every rank is computed.

Invariant: a layout and a shape determine, on any machine, the same disjoint boxes that together cover the
tensor. So the manifest names a tensor's layout and never lists a regular chunk.

    MeshLayout      a device mesh and one placement per mesh axis (FSDP2, HSDP, TP, plain replication)
    ListedLayout    chunks listed outright (foreign planners, irregular shardings)
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np

from fsdp_ckpt.errors import CorruptCheckpointError, UnencodableStateError
from fsdp_ckpt.plan.box import Box

__all__ = ["Chunks", "Layout", "ListedLayout", "Mesh", "MeshLayout", "Placement"]

Ints: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Chunks:
    """Every non-empty chunk of one tensor, each once.

    Args:
        ranks: Rank whose file holds the chunk, shape (n,).
        offsets: First element per dim, shape (n, ndim).
        sizes: Elements per dim, shape (n, ndim).
    """

    ranks: Ints
    offsets: Ints
    sizes: Ints

    def __len__(self) -> int:
        return len(self.ranks)

    def box(self, i: int) -> Box:
        """Return chunk ``i`` as a box."""
        return Box(tuple(self.offsets[i].tolist()), tuple(self.sizes[i].tolist()))

    def overlapping(self, wanted: Box) -> Ints:
        """Return the positions of the chunks that share an element with ``wanted``, shape (m,)."""
        start = np.maximum(self.offsets, np.array(wanted.offsets, np.int64))
        stop = np.minimum(
            self.offsets + self.sizes, np.array(wanted.offsets, np.int64) + np.array(wanted.sizes, np.int64)
        )
        return np.flatnonzero((stop > start).all(axis=1)).astype(np.int64)


@dataclass(frozen=True)
class Mesh:
    """An n-dimensional arrangement of ranks.

    Args:
        shape: Ranks per axis, at least one axis.
        ranks: Global ranks in row-major order, ``prod(shape)`` of them, each once.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        whole = bool(self.shape) and math.prod(self.shape) == len(self.ranks)
        if not whole or len(set(self.ranks)) != len(self.ranks):
            raise CorruptCheckpointError(f"mesh of shape {self.shape} with {len(self.ranks)} ranks")

    @classmethod
    def world(cls, size: int) -> Mesh:
        """Return the 1-D mesh of all ranks."""
        return cls((size,), tuple(range(size)))

    @cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.ranks))

    def __hash__(self) -> int:
        return self._hash  # thousands of ranks: hashed once, not at every look-up

    @cached_property
    def positions(self) -> dict[int, int]:
        """Rank → position in ``ranks``."""
        return {rank: i for i, rank in enumerate(self.ranks)}


@dataclass(frozen=True, slots=True)
class Placement:
    """What one mesh axis does to a tensor.

    Args:
        dim: Tensor dim that the axis splits, or ``None`` where it replicates.
        split: 1, or for a strided shard the number of pieces into which later axes have already cut the
            dim before this one cuts each of them.
    """

    dim: int | None = None
    split: int = 1

    def __str__(self) -> str:
        if self.dim is None:
            return "R"
        return f"S{self.dim}" if self.split == 1 else f"S{self.dim}/{self.split}"

    @classmethod
    def parse(cls, text: str) -> Placement:
        """Parse what ``str`` made: ``R``, ``S0``, ``S0/4``."""
        if text == "R":
            return cls()
        match = re.fullmatch(r"S(\d{1,3})(?:/(\d{1,9}))?", text)
        if match is None:
            raise CorruptCheckpointError(f"unknown placement {text[:40]!r}")
        return cls(int(match[1]), int(match[2] or 1))


@dataclass(frozen=True)
class MeshLayout:
    """A device mesh and what each of its axes does to the tensor.

    Args:
        mesh: The mesh.
        placements: One per mesh axis.
    """

    mesh: Mesh
    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        if len(self.placements) != len(self.mesh.shape):
            raise CorruptCheckpointError(
                f"{len(self.placements)} placements for a mesh of {len(self.mesh.shape)} axes"
            )

    @cached_property
    def num_replicas(self) -> int:
        """How many ranks hold each element."""
        return math.prod(
            n for n, p in zip(self.mesh.shape, self.placements, strict=True) if p.dim is None
        )

    @cached_property
    def _coordinates(self) -> Ints:
        """Coordinates of all ranks, shape (num axes, num ranks)."""
        return np.indices(self.mesh.shape, dtype=np.int64).reshape(len(self.mesh.shape), -1)

    @cached_property
    def replica_ranks(self) -> Ints:
        """Ranks by replica, shape (num_replicas, ranks per replica)."""
        axes = range(len(self.mesh.shape))
        replicated = [i for i in axes if self.placements[i].dim is None]
        sharded = [i for i in axes if self.placements[i].dim is not None]
        ranks = np.array(self.mesh.ranks, np.int64).reshape(self.mesh.shape)
        return ranks.transpose(*replicated, *sharded).reshape(self.num_replicas, -1)

    @cached_property
    def cut_order(self) -> tuple[int, ...]:
        """Sharding mesh axes in the order in which they cut: a strided shard after those it strides over.

        Raises:
            UnencodableStateError: A strided shard matches no axes of the mesh.
        """
        order: list[int] = []
        for axis in reversed(range(len(self.placements))):
            placement = self.placements[axis]
            if placement.dim is None:
                continue
            position, pieces = 0, 1
            while pieces != placement.split:
                if position == len(order):
                    raise UnencodableStateError(
                        f"a strided shard over {placement.split} pieces matches no axes of mesh "
                        f"{self.mesh.shape}"
                    )
                if self.placements[order[position]].dim == placement.dim:
                    pieces *= self.mesh.shape[order[position]]
                position += 1
            order.insert(position, axis)
        return tuple(order)

    def _cut(self, shape: tuple[int, ...], columns: Ints) -> tuple[Ints, Ints]:
        """Cut ``shape`` for the ranks at ``columns``; return offsets and sizes, each (n, ndim)."""
        offsets = np.zeros((len(columns), len(shape)), np.int64)
        sizes = np.tile(np.array(shape, np.int64), (len(columns), 1))
        for axis in self.cut_order:
            dim = self.placements[axis].dim
            if dim is None or dim >= len(shape):
                raise CorruptCheckpointError(f"placement on dim {dim} of a tensor of shape {shape}")
            # torch.chunk: every piece has ceil(n / pieces) elements but the last ones.
            piece = -(-sizes[:, dim] // self.mesh.shape[axis])
            start = np.minimum(sizes[:, dim], self._coordinates[axis][columns] * piece)
            stop = np.minimum(sizes[:, dim], start + piece)
            offsets[:, dim] += start
            sizes[:, dim] = stop - start
        return offsets, sizes

    def box_of(self, shape: tuple[int, ...], rank: int) -> Box | None:
        """Return the box that ``rank`` holds (may have no elements), or ``None`` outside the mesh."""
        position = self.mesh.positions.get(rank)
        if position is None:
            return None
        offsets, sizes = self._cut(shape, np.array([position], np.int64))
        return Box(tuple(offsets[0].tolist()), tuple(sizes[0].tolist()))

    def replica_of(self, rank: int) -> int | None:
        """Return which replica ``rank`` belongs to, or ``None`` outside the mesh."""
        found = np.argwhere(self.replica_ranks == rank)
        return int(found[0][0]) if len(found) else None

    def chunks(self, shape: tuple[int, ...], replica: int) -> Chunks:
        """Return every non-empty chunk, held by the ranks of one replica."""
        ranks = self.replica_ranks[replica]
        columns = np.array([self.mesh.positions[r] for r in ranks.tolist()], np.int64)
        offsets, sizes = self._cut(shape, columns)
        full = (sizes > 0).all(axis=1)
        return Chunks(ranks[full], offsets[full], sizes[full])


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

    def chunks(self, shape: tuple[int, ...], replica: int) -> Chunks:
        """Return every chunk; there is one replica only."""
        n = len(self.listed)
        return Chunks(
            np.array([rank for rank, _ in self.listed], np.int64),
            np.array([box.offsets for _, box in self.listed], np.int64).reshape(n, len(shape)),
            np.array([box.sizes for _, box in self.listed], np.int64).reshape(n, len(shape)),
        )


Layout: TypeAlias = MeshLayout | ListedLayout
