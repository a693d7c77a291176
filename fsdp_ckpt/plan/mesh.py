"""Layouts on a device mesh: one placement per mesh axis (FSDP2, HSDP, TP × FSDP, plain replication)."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from fsdp_ckpt.errors import CorruptCheckpointError, UnencodableStateError
from fsdp_ckpt.plan.box import Box
from fsdp_ckpt.plan.chunks import Chunks, Ints

__all__ = ["Mesh", "MeshLayout", "Placement"]

# Answers that a layout remembers, and the chunks of one: megabytes at most.
MAX_REMEMBERED = 1024
REMEMBERED_CHUNKS = 16


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
        return cls.whole((size,))

    @staticmethod
    @lru_cache(maxsize=16)
    def whole(shape: tuple[int, ...]) -> Mesh:
        """Return the mesh of the ranks 0, 1, 2 ...; one object per shape, which is quick to compare."""
        return Mesh(shape, tuple(range(math.prod(shape))))

    @cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.ranks))

    def __hash__(self) -> int:
        return self._hash  # thousands of ranks: hashed once, not at every look-up

    @cached_property
    def max_rank(self) -> int:
        """The highest rank."""
        return max(self.ranks)

    @cached_property
    def positions(self) -> dict[int, int]:
        """Rank → position in ``ranks``."""
        return {rank: i for i, rank in enumerate(self.ranks)}

    def coordinates_of(self, rank: int) -> tuple[int, ...] | None:
        """Return a rank's position along each axis, or ``None`` outside the mesh."""
        position = self.positions.get(rank)
        if position is None:
            return None
        return _unravel(position, self.shape)

    def rank_at(self, coordinates: tuple[int, ...]) -> int:
        """Return the rank at a position along each axis."""
        position = 0
        for i, n in zip(coordinates, self.shape, strict=True):
            position = position * n + i
        return self.ranks[position]


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

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank that holds a part."""
        return self.mesh.ranks

    @property
    def max_rank(self) -> int:
        """The highest of them."""
        return self.mesh.max_rank

    @cached_property
    def _replicated(self) -> tuple[int, ...]:
        """Axes that replicate."""
        return tuple(i for i, p in enumerate(self.placements) if p.dim is None)

    @cached_property
    def num_replicas(self) -> int:
        """How many ranks hold each element."""
        return math.prod(self.mesh.shape[i] for i in self._replicated)

    @cached_property
    def replica_ranks(self) -> Ints:
        """Ranks by replica, shape (num_replicas, ranks per replica)."""
        sharded = [i for i in range(len(self.placements)) if i not in self._replicated]
        ranks = np.array(self.mesh.ranks, np.int64).reshape(self.mesh.shape)
        return ranks.transpose(*self._replicated, *sharded).reshape(self.num_replicas, -1)

    def replica_of(self, rank: int) -> int | None:
        """Return which replica ``rank`` belongs to, or ``None`` outside the mesh."""
        coordinates = self.mesh.coordinates_of(rank)
        if coordinates is None:
            return None
        replica = 0
        for axis in self._replicated:
            replica = replica * self.mesh.shape[axis] + coordinates[axis]
        return replica

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

    @cached_property
    def _cuts(self) -> tuple[tuple[int, int], ...]:
        """(mesh axis, tensor dim) of every cut, in order."""
        dims = ((axis, self.placements[axis].dim) for axis in self.cut_order)
        return tuple((axis, dim) for axis, dim in dims if dim is not None)

    @property
    def min_ndim(self) -> int:
        """Dims that a tensor needs for this layout."""
        return max((dim + 1 for _, dim in self._cuts), default=0)

    def _check_dims(self, shape: tuple[int, ...]) -> None:
        if len(shape) < self.min_ndim:
            raise CorruptCheckpointError(
                f"placement on dim {self.min_ndim - 1} of a tensor of shape {shape}"
            )

    def box_of(self, shape: tuple[int, ...], rank: int) -> Box | None:
        """Return the box that ``rank`` holds (may have no elements), or ``None`` outside the mesh."""
        coordinates = self.mesh.coordinates_of(rank)
        if coordinates is None:
            return None
        self._check_dims(shape)
        offsets, sizes = [0] * len(shape), list(shape)
        for axis, dim in self._cuts:
            start, stop = _piece(sizes[dim], self.mesh.shape[axis], coordinates[axis])
            offsets[dim] += start
            sizes[dim] = stop - start
        return Box(tuple(offsets), tuple(sizes))

    def boxes_of(self, shape: tuple[int, ...], rank: int) -> list[Box]:
        """Return the non-empty boxes that ``rank`` holds: one or none."""
        box = self.box_of(shape, rank)
        return [box] if box is not None and box.num_elements else []

    def overlapping(
        self, shape: tuple[int, ...], replica: int, wanted: Box
    ) -> list[tuple[int, Box]]:
        """Return (rank, chunk) for every chunk of one replica that shares an element with ``wanted``.

        Costs as much as there are such chunks, not as there are ranks; where tensors of one shape ask the
        same, as those of equal layers do, once for all of them.
        """
        asked = shape, replica, wanted
        found = self._remembered.get(asked)
        if found is None:
            found = tuple(self._find_overlapping(*asked))
            if len(found) <= REMEMBERED_CHUNKS:
                if len(self._remembered) >= MAX_REMEMBERED:
                    self._remembered.clear()
                self._remembered[asked] = found
        return list(found)

    @cached_property
    def _remembered(self) -> dict[tuple[tuple[int, ...], int, Box], tuple[tuple[int, Box], ...]]:
        """Answers that were given before."""
        return {}

    def _find_overlapping(
        self, shape: tuple[int, ...], replica: int, wanted: Box
    ) -> list[tuple[int, Box]]:
        if not wanted.num_elements:
            return []
        per_dim = [
            self._overlapping_pieces(dim, shape[dim], start, start + size)
            for dim, (start, size) in enumerate(zip(wanted.offsets, wanted.sizes, strict=True))
        ]
        sizes = tuple(self.mesh.shape[axis] for axis in self._replicated)
        fixed = dict(zip(self._replicated, _unravel(replica, sizes), strict=True))
        found = []
        for pieces in itertools.product(*per_dim):
            coordinates = dict(fixed)
            for where, _, _ in pieces:
                coordinates.update(where)
            rank = self.mesh.rank_at(tuple(coordinates[i] for i in range(len(self.mesh.shape))))
            box = Box(tuple(start for _, start, _ in pieces), tuple(n for _, _, n in pieces))
            found.append((rank, box))
        return found

    def _overlapping_pieces(
        self, dim: int, length: int, low: int, high: int
    ) -> list[tuple[dict[int, int], int, int]]:
        """Return (coordinate per axis, start, length) of the pieces of one dim that meet [low, high)."""
        pieces: list[tuple[dict[int, int], int, int]] = [({}, 0, length)]
        for axis, cut_dim in self._cuts:
            if cut_dim != dim:
                continue
            finer = []
            for where, start, n in pieces:
                size = -(-n // self.mesh.shape[axis])
                first = max(low - start, 0) // size
                last = (min(high - start, n) - 1) // size
                for i in range(first, last + 1):
                    finer.append(({**where, axis: i}, start + i * size, min(size, n - i * size)))
            pieces = finer
        return pieces

    def chunks(self, shape: tuple[int, ...], replica: int) -> Chunks:
        """Return every non-empty chunk, held by the ranks of one replica."""
        self._check_dims(shape)
        ranks = self.replica_ranks[replica]
        positions = np.array([self.mesh.positions[r] for r in ranks.tolist()], np.int64)
        coordinates = np.unravel_index(positions, self.mesh.shape)
        offsets = np.zeros((len(ranks), len(shape)), np.int64)
        sizes = np.tile(np.array(shape, np.int64), (len(ranks), 1))
        for axis, dim in self._cuts:
            piece = -(-sizes[:, dim] // self.mesh.shape[axis])
            start = np.minimum(sizes[:, dim], coordinates[axis] * piece)
            stop = np.minimum(sizes[:, dim], start + piece)
            offsets[:, dim] += start
            sizes[:, dim] = stop - start
        full = (sizes > 0).all(axis=1)
        return Chunks(ranks[full], offsets[full], sizes[full])


def _piece(length: int, num_pieces: int, i: int) -> tuple[int, int]:
    """Return the half-open range of piece ``i``.

    Source: ``torch.chunk``: every piece has ceil(length / num_pieces) elements but the last ones.
    """
    size = -(-length // num_pieces)
    return min(length, i * size), min(length, (i + 1) * size)


def _unravel(position: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    coordinates = []
    for n in reversed(shape):
        coordinates.append(position % n)
        position //= n
    return tuple(reversed(coordinates))
