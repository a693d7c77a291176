"""Which bytes of a stored tensor a box takes. Half-open ranges, in order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from fsdp_ckpt.plan.box import Box

__all__ = ["box_ranges"]


def box_ranges(inner: Box, outer: Box, num_bytes: int, max_gap: int) -> Iterator[tuple[int, int]]:
    """Yield the byte ranges, within row-major ``outer``, that hold ``inner``, in order.

    Args:
        inner: Non-empty box inside ``outer``.
        outer: Box of the stored chunk.
        num_bytes: Bytes per element.
        max_gap: Bytes between two ranges up to which they are one.

    Source: row-major (C order) addressing, from the innermost dim outwards.
    """
    shape, sizes = outer.sizes, inner.sizes
    strides = [num_bytes * math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    span, dim = num_bytes, len(shape)
    while dim and (sizes[dim - 1] == 1 or strides[dim - 1] - span <= max_gap):
        dim -= 1
        span += (sizes[dim] - 1) * strides[dim]
    pairs = zip(inner.offsets, outer.offsets, strides, strict=True)
    first = sum((a - b) * stride for a, b, stride in pairs)
    for steps in itertools.product(*(range(n) for n in sizes[:dim])):
        start = first + sum(i * stride for i, stride in zip(steps, strides, strict=False))
        yield start, start + span
