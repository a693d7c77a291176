"""The image: one host buffer that is the shard file.

Invariant: a buffer is allocated and touched once and used again; freshly touched memory costs several
times the copy itself (page faults).
"""

from __future__ import annotations

import mmap
from collections.abc import Callable

import torch

from fsdp_ckpt.plan.image import Entry, ImageLayout

__all__ = ["ImagePool", "fill_image", "view_bytes", "view_entry"]


class ImagePool:
    """Keeps the buffers of finished images for the next ones."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def acquire(self, num_bytes: int) -> mmap.mmap:
        """Return a page-aligned buffer of at least ``num_bytes``; its content is arbitrary."""
        fitting = [b for b in self._free if len(b) >= num_bytes]
        if fitting:
            buffer = min(fitting, key=len)
            self._free.remove(buffer)
            return buffer
        self._free.clear()  # too small for today's shard, so for the next one too
        return mmap.mmap(-1, max(num_bytes, mmap.PAGESIZE))

    def release(self, buffer: mmap.mmap) -> None:
        """Give a buffer back."""
        self._free.append(buffer)

    def close(self) -> None:
        """Drop the free buffers."""
        self._free.clear()


def view_bytes(buffer: mmap.mmap | memoryview, start: int, stop: int) -> torch.Tensor:
    """Return a uint8 tensor over ``buffer[start:stop]``, sharing its memory, shape (stop - start,)."""
    if start == stop:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(buffer, dtype=torch.uint8, count=stop - start, offset=start)


def view_entry(
    buffer: mmap.mmap | memoryview, data_offset: int, entry: Entry, dtype: torch.dtype
) -> torch.Tensor:
    """Return the entry as a tensor over the image's memory, of the chunk's shape."""
    start = data_offset + entry.byte_offset
    return view_bytes(buffer, start, start + entry.num_bytes).view(dtype).view(entry.box.sizes)


def fill_image(
    buffer: mmap.mmap,
    data_offset: int,
    layout: ImageLayout,
    resolve: Callable[[Entry], torch.Tensor],
) -> None:
    """Copy the live tensors into the image: the only moment for which training must wait.

    Args:
        buffer: At least ``data_offset + layout.data_bytes`` bytes.
        data_offset: Start of the data, in bytes.
        layout: Where each entry goes.
        resolve: Entry → live local tensor of the chunk's shape, on any device.
    """
    with torch.no_grad():
        for entry in layout.entries:
            source = resolve(entry).detach()
            target = view_entry(buffer, data_offset, entry, source.dtype)
            target.copy_(source, non_blocking=False)
