"""All chunks of one tensor, as arrays."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from fsdp_ckpt.plan.box import Box

__all__ = ["Chunks", "Ints"]

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

    @classmethod
    def of(cls, listed: Iterable[tuple[int, Box]], ndim: int) -> Chunks:
        """Collect (rank, box) pairs of a tensor of ``ndim`` dims."""
        pairs = list(listed)
        shape = (len(pairs), ndim)
        return cls(
            np.array([rank for rank, _ in pairs], np.int64),
            np.array([box.offsets for _, box in pairs], np.int64).reshape(shape),
            np.array([box.sizes for _, box in pairs], np.int64).reshape(shape),
        )

    def __len__(self) -> int:
        return len(self.ranks)

    def box(self, i: int) -> Box:
        """Return chunk ``i`` as a box."""
        return Box(tuple(self.offsets[i].tolist()), tuple(self.sizes[i].tolist()))

    def overlapping(self, wanted: Box) -> Ints:
        """Return the positions of the chunks that share an element with ``wanted``, shape (m,)."""
        start = np.maximum(self.offsets, np.array(wanted.offsets, np.int64))
        stop = np.minimum(
            self.offsets + self.sizes,
            np.array(wanted.offsets, np.int64) + np.array(wanted.sizes, np.int64),
        )
        return np.flatnonzero((stop > start).all(axis=1)).astype(np.int64)
