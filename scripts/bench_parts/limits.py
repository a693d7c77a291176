"""What the machine can do: the plainest way to move the same bytes."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch

__all__ = ["PlainBuffer", "align", "compact_memory", "drop_cached", "share_of"]

PIECE_BYTES = 16 * 1024 * 1024
NUM_THREADS = 2
ALIGNED_BYTES = 4096  # what O_DIRECT asks of address, offset and length

Part = tuple[Path, int, int]  # a file's bytes from start to stop


class PlainBuffer:
    """Page-aligned memory, touched; its bytes are copied, written and read without any format.

    Args:
        num_bytes: Rounded up to whole pages.
    """

    def __init__(self, num_bytes: int) -> None:
        self._memory = mmap.mmap(-1, max(align(num_bytes), ALIGNED_BYTES))
        self._view = memoryview(self._memory)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        ctypes.memset(self._address, 1, len(self._memory))

    def copy(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy contiguous tensors back to back into the buffer."""
        byte_offset = 0
        for tensor in tensors:
            ctypes.memmove(self._address + byte_offset, tensor.data_ptr(), tensor.nbytes)
            byte_offset += tensor.nbytes

    def write(self, path: Path) -> None:
        """Write the buffer to a new file; durable when this returns."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o666)
        try:
            os.posix_fallocate(fd, 0, len(self._view))

            def put(at: int) -> None:
                piece = self._view[at : at + PIECE_BYTES]
                if os.pwrite(fd, piece, at) != len(piece):
                    raise OSError(f"{path}: short write at byte {at}")

            with ThreadPoolExecutor(NUM_THREADS) as threads:
                list(threads.map(put, range(0, len(self._view), PIECE_BYTES)))
            os.fsync(fd)
        finally:
            os.close(fd)

    def read(self, parts: Sequence[Part]) -> None:
        """Read parts of files, back to back; their starts are aligned, and all stops but a file's end."""
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            pending, byte_offset = [], 0
            fds = {path: os.open(path, os.O_RDONLY | os.O_DIRECT) for path, _, _ in parts}
            for path, start, stop in parts:
                for at in range(start, stop, PIECE_BYTES):
                    end = min(at + PIECE_BYTES, stop)
                    piece = self._view[byte_offset : byte_offset + align(end - at)]
                    pending.append(threads.submit(self._read_piece, fds[path], at, end, piece))
                    byte_offset += len(piece)
            for future in pending:
                future.result()
        for fd in fds.values():
            os.close(fd)

    @staticmethod
    def _read_piece(fd: int, start: int, stop: int, piece: memoryview) -> None:
        found = os.preadv(fd, [piece], start)
        if found < stop - start:
            raise OSError(f"{found} of {stop - start} bytes at byte {start}")


def align(num_bytes: int) -> int:
    """Round up to what direct I/O takes."""
    return -(-num_bytes // ALIGNED_BYTES) * ALIGNED_BYTES


def share_of(files: Sequence[Path], rank: int, world_size: int) -> list[Part]:
    """Return the rank's equal share of the files' bytes."""
    sizes = [path.stat().st_size for path in files]
    total = sum(align(size) for size in sizes)
    first, last = (align(total * r // world_size) for r in (rank, rank + 1))
    parts, at = [], 0
    for path, size in zip(files, sizes, strict=True):
        start, stop = max(first - at, 0), min(last - at, size)
        if start < stop:
            parts.append((path, start, stop))
        at += align(size)
    return parts


def compact_memory() -> None:
    """Have the kernel put free memory together, where it lets us.

    A disk is slower with memory that lies in single pages, and what lies so goes to whoever asks first.
    """
    with suppress(OSError):  # not root, or /proc is read-only: then it is as it is
        Path("/proc/sys/vm/compact_memory").write_text("1", encoding="ascii")


def drop_cached(folder: Path) -> None:
    """Make the page cache forget every file below ``folder``."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)  # dirty pages stay
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
