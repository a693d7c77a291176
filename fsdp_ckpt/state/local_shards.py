"""A tensor of which this rank holds a range of elements: FSDP1's flat parameters, ZeRO's partitions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fsdp_ckpt.plan.box import Box
from fsdp_ckpt.plan.flat import FlatLayout

__all__ = ["LocalShards"]


@dataclass(frozen=True, slots=True)
class LocalShards:
    """One tensor's elements on this rank, where they lie in flat memory.

    Args:
        shape: Global shape.
        layout: Which elements which rank holds.
        boxes: What this rank holds, in the order of the elements.
        local: These elements, shape (n,); shares memory with the live flat tensor.
    """

    shape: tuple[int, ...]
    layout: FlatLayout
    boxes: tuple[Box, ...]
    local: torch.Tensor

    @classmethod
    def of(
        cls, shape: tuple[int, ...], layout: FlatLayout, rank: int, local: torch.Tensor
    ) -> LocalShards:
        """Describe ``local``, the elements that ``layout`` gives to ``rank``."""
        low, high = layout.range_of(shape, rank)
        if tuple(local.shape) != (high - low,):
            raise AssertionError(f"{tuple(local.shape)} elements where {high - low} are due")
        return cls(shape, layout, tuple(layout.boxes_of(shape, rank)), local)

    @property
    def dtype(self) -> torch.dtype:
        """The elements' type."""
        return self.local.dtype

    def parts(self) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yield each box and its elements, shape ``box.sizes``; shares memory."""
        start = 0
        for box in self.boxes:
            stop = start + box.num_elements
            yield box, self.local[start:stop].view(box.sizes)
            start = stop
