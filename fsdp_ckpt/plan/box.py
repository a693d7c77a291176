"""Boxes: half-open ranges of a tensor's elements, one per dim."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fsdp_ckpt.errors import MismatchError

__all__ = ["Box", "byte_span", "overlap", "relative_slices"]


@dataclass(frozen=True, slots=True)
class Box:
    """A chunk of a tensor.

    Args:
        offsets: First element per dim, global coordinates, shape (ndim,).
        sizes: Elements per dim, shape (ndim,).
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """Return the box of the whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def num_elements(self) -> int:
        """Product of the sizes; 1 for a 0-d tensor."""
        return math.prod(self.sizes)


def overlap(saved: Box, wanted: Box) -> Box | None:
    """Intersect two boxes of one tensor.

    Args:
        saved: Chunk as written; offsets and sizes in elements, global coordinates, shape (ndim,).
        wanted: Chunk this rank holds; same tensor.

    Returns:
        The common box, or ``None`` where it is empty.

    Raises:
        MismatchError: The boxes differ in number of dimensions.

    Source: half-open interval intersection per dimension.
    """
    if len(saved.offsets) != len(wanted.offsets):
        raise MismatchError(
            f"boxes of {len(saved.offsets)} and {len(wanted.offsets)} dims do not compare"
        )
    starts, sizes = [], []
    for a, n, b, m in zip(saved.offsets, saved.sizes, wanted.offsets, wanted.sizes, strict=True):
        start = max(a, b)
        size = min(a + n, b + m) - start
        if size <= 0:
            return None
        starts.append(start)
        sizes.append(size)
    return Box(tuple(starts), tuple(sizes))


def relative_slices(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Return the slices that select ``inner`` from an array holding ``outer``; ``inner`` lies inside."""
    return tuple(
        slice(a - b, a - b + n)
        for a, n, b in zip(inner.offsets, inner.sizes, outer.offsets, strict=True)
    )


def byte_span(inner: Box, outer: Box, num_bytes: int) -> tuple[int, int]:
    """Return the half-open byte range, within row-major ``outer``, that holds all of ``inner``.

    Args:
        inner: Non-empty box inside ``outer``.
        outer: Box of the stored chunk.
        num_bytes: Bytes per element.

    Source: row-major (C order) addressing of the first and the last element.
    """
    first = last = 0
    for a, n, b, m in zip(inner.offsets, inner.sizes, outer.offsets, outer.sizes, strict=True):
        first = first * m + (a - b)
        last = last * m + (a - b + n - 1)
    return first * num_bytes, (last + 1) * num_bytes
