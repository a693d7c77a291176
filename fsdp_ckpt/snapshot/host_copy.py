"""From host memory into an image's data, past the processor's cache, and digested on the way.

    live tensor ── read once ──> cache ── past it ──> image
                                   └── digest of the block

A digest taken later reads the image again, which takes as long as the copy's reading did. Taken of what is in
the cache just now it takes a fraction, and training is not slower for it afterwards.

Invariant: a digest is of what was copied, unless the tensor is written to at that moment: it is taken where
training stands still, and by the writer where it goes on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
import xxhash

from fsdp_ckpt.plan.image import BLOCK_BYTES

__all__ = ["HostCopy", "is_plain"]

stream_copy: Callable[..., None] | None
try:
    from fsdp_ckpt.snapshot import _stream_copy
except ImportError:  # installed where there was no compiler
    stream_copy = None
else:
    stream_copy = _stream_copy.stream_copy


def is_plain(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether to copy a tensor is to copy its bytes, and torch has no threads to share that among."""
    return (
        source.is_contiguous()
        and source.device.type == "cpu"
        and source.dtype == target.dtype
        and source.shape == target.shape
        and torch.get_num_threads() == 1
        and not source.is_conj()
        and not source.is_neg()
    )


class HostCopy:
    """Copies memory into one image, in the order in which it lies there.

    Args:
        data_bytes: Of the image.
        digesting: Whether training stands still, so that blocks can be digested on the way.
    """

    def __init__(self, data_bytes: int, *, digesting: bool = False) -> None:
        # Block → its digest, of those that came this way as a whole.
        self.digests: dict[int, str] = {}
        self._data_bytes = data_bytes
        self._is_digesting = digesting and stream_copy is not None
        self._hasher: Any = None  # of the block that is being copied, from its start
        self._next = 0  # byte of the data

    def copy(self, start: int, target: int, source: int, num_bytes: int) -> None:
        """Copy bytes.

        Args:
            start: First byte in the data.
            target: Its address in the image.
            source: Address of what is copied.
            num_bytes: How many.
        """
        if self._is_digesting:
            self._copy_digesting(start, target, source, num_bytes)
        elif stream_copy is not None:
            stream_copy(target, source, num_bytes)
        else:
            ctypes.memmove(target, source, num_bytes)  # without the interpreter lock

    def _copy_digesting(self, start: int, target: int, source: int, num_bytes: int) -> None:
        assert stream_copy is not None
        if start != self._next:  # what lies between came another way
            self._hasher = None
        self._next = stop = start + num_bytes
        first = min(-(-start // BLOCK_BYTES) * BLOCK_BYTES, stop)
        last = max(stop // BLOCK_BYTES * BLOCK_BYTES, first)
        self._copy_part(start, first, target, source)
        target, source = target + first - start, source + first - start
        new, copy, digests = xxhash.xxh3_64, stream_copy, self.digests
        for at in range(first, last, BLOCK_BYTES):  # thousands of times a save
            hasher = new()
            copy(target, source, BLOCK_BYTES, hasher.update)
            digests[at // BLOCK_BYTES] = hasher.hexdigest()
            target += BLOCK_BYTES
            source += BLOCK_BYTES
        self._copy_part(last, stop, target, source)

    def _copy_part(self, start: int, stop: int, target: int, source: int) -> None:
        """Copy a part of one block."""
        assert stream_copy is not None
        if start == stop:
            return
        if start % BLOCK_BYTES == 0:
            self._hasher = xxhash.xxh3_64()
        hasher = self._hasher
        stream_copy(target, source, stop - start, hasher and hasher.update)
        if hasher and (stop % BLOCK_BYTES == 0 or stop == self._data_bytes):
            self.digests[start // BLOCK_BYTES] = hasher.hexdigest()
