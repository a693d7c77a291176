"""Host buffers for images: shared memory without a name, allocated and touched once, used again.

Invariant: freshly touched memory costs several times the copy itself (page faults), so a buffer outlives the
save it was made for. A memfd needs no room in /dev/shm, and its descriptor gives another process the same
bytes.
"""

from __future__ import annotations

import mmap
import os
import threading
from contextlib import suppress
from typing import Any

import torch

__all__ = ["HostBuffer", "ImagePool"]


class HostBuffer:
    """Page-aligned memory behind a file descriptor.

    Args:
        num_bytes: At least so many; rounded up to a page.
        pin: Page-lock it, so that an accelerator can copy into it asynchronously.
    """

    def __init__(self, num_bytes: int, *, pin: bool = False) -> None:
        size = -(-max(num_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.fd = os.memfd_create("fsdp_ckpt-image", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, size)
            self.memory = mmap.mmap(self.fd, size)
            with suppress(OSError):  # a kernel without huge pages for shared memory
                self.memory.madvise(mmap.MADV_HUGEPAGE)
        except BaseException:
            os.close(self.fd)
            raise
        # Tensors over the memory that are worth keeping, by their user's keys, and what they are views of.
        self.views: dict[Any, torch.Tensor] = {}
        self.views_are_of: Any = None
        # Name of the file whose bytes are in here, durable too; of the header not all of them.
        self.holds = ""
        self._pinned = False
        if pin:
            self._pin()

    def __len__(self) -> int:
        return len(self.memory)

    def _pin(self) -> None:
        # Only CUDA (and ROCm under its name) lets torch register memory that it did not allocate.
        if torch.cuda.is_available():
            code = _cudart().cudaHostRegister(self._address(), len(self), 0)
            self._pinned = int(code) == 0  # without it copies are only slower

    def _address(self) -> int:
        return torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()

    def trim(self, num_bytes: int) -> None:
        """Give back the memory beyond ``num_bytes``; it can be used again."""
        kept = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        # A device would go on using the pages that were registered, and the file would have others.
        if kept < len(self) and not self._pinned:
            os.ftruncate(self.fd, kept)
            os.ftruncate(self.fd, len(self))

    def close(self) -> None:
        """Give the memory back, or leave that to the last tensor that still looks at it."""
        if self.fd < 0:
            return
        if self._pinned:
            _cudart().cudaHostUnregister(self._address())
        self.views, self.views_are_of = {}, None
        fd, self.fd = self.fd, -1
        try:
            self.memory.close()
            os.ftruncate(fd, 0)  # gone also where a writer still has it mapped
        except BufferError:  # someone looks at it
            return
        finally:
            os.close(fd)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no types there


class ImagePool:
    """Keeps the buffers of finished images for the next ones; any thread may use it.

    Args:
        keep: Free buffers to hold on to.
        pin: Page-lock them; see :class:`HostBuffer`.
    """

    def __init__(self, keep: int = 1, *, pin: bool = False) -> None:
        self._keep = keep
        self._pin = pin
        self._free: list[HostBuffer] = []
        self._lock = threading.Lock()
        self._closed = False

    def acquire(self, num_bytes: int) -> HostBuffer:
        """Return a buffer of at least ``num_bytes``; its content is arbitrary."""
        with self._lock:
            fitting = [b for b in self._free if len(b) >= num_bytes]
            if fitting:
                # Among equals the oldest: what was saved last is what a run may go back to.
                buffer = min(fitting, key=lambda b: (len(b), b.holds != ""))
                self._free.remove(buffer)
                buffer.holds = ""
                buffer.trim(num_bytes)
                return buffer
            too_small, self._free = self._free, []  # for today's shard, so for the next one too
        for buffer in too_small:
            buffer.close()
        return HostBuffer(num_bytes, pin=self._pin)

    def take_holding(self, name: str) -> HostBuffer | None:
        """Return the free buffer that still has the bytes of the file of that name, to be given back."""
        with self._lock:
            for buffer in self._free:
                if buffer.holds == name:
                    self._free.remove(buffer)
                    buffer.holds = ""  # whoever takes it may change it
                    return buffer
        return None

    def release(self, buffer: HostBuffer, *, holds: str = "") -> None:
        """Give a buffer back.

        Args:
            buffer: No one looks at it any more.
            holds: Name of the file whose bytes it has, if any.
        """
        buffer.holds = holds
        with self._lock:
            self._free.append(buffer)
            excess = self._free[: -self._keep] if not self._closed else self._free
            self._free = self._free[len(excess) :]
        for dropped in excess:
            dropped.close()

    def close(self) -> None:
        """Free the buffers, and those in use when they are given back."""
        with self._lock:
            self._closed = True
            free, self._free = self._free, []
        for buffer in free:
            buffer.close()
