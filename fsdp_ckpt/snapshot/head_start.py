"""Copying that begins before the ranks have agreed to save.

    vote of all ranks ──────────────────> answer ──> header, the rest of the copy
    first entries into the image ───────>│

While the answer travels nothing else could be done; it nearly always is yes, and the image laid out as the
last one was. Where it is not, the bytes are copied anew.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fsdp_ckpt.plan.image import Entry, ImageLayout
from fsdp_ckpt.snapshot.buffer import ImagePool
from fsdp_ckpt.snapshot.host_copy import HostCopy
from fsdp_ckpt.snapshot.image import Filled, SideStreams, fill_image

__all__ = ["HeadStart"]


class HeadStart:
    """The first entries of an image that may be asked for.

    Args:
        pool: Where the buffer for the image comes from.
        data_offset: Where its data will start, in bytes, if its header is as long as that of the last one.
        layout: Of its data.
    """

    def __init__(self, pool: ImagePool, data_offset: int, layout: ImageLayout) -> None:
        self.buffer = pool.acquire(data_offset + layout.data_bytes)
        self._pool = pool
        self.is_given_up = False
        self.data_offset = data_offset
        self.layout = layout
        self.host_copy = HostCopy(layout.data_bytes, digesting=True)  # now and for the rest
        self.num_entries = 0  # copied

    def copy(
        self,
        resolve: Callable[[Entry], torch.Tensor],
        is_over: Callable[[], bool],
        streams: SideStreams,
        filled: Filled | None = None,
    ) -> None:
        """Copy entries in their order for as long as it is not over.

        Args:
            resolve: Entry → live local tensor.
            is_over: Asked before each entry.
            streams: Where accelerators copy.
            filled: Told now and then how many bytes of the image are filled; those of the header count.
        """
        self.num_entries = fill_image(
            self.buffer,
            self.data_offset,
            self.layout,
            resolve,
            filled=filled,
            is_over=is_over,
            host_copy=self.host_copy,
            streams=streams,
        )

    def give_up(self) -> None:
        """Give the buffer back, whose bytes are of no use; once more is fine."""
        if not self.is_given_up:
            self.is_given_up = True
            self._pool.release(self.buffer)

    def fits(self, data_offset: int, layout: ImageLayout) -> bool:
        """Whether an image has its data where this has put it."""
        return (data_offset, layout) == (self.data_offset, self.layout)
