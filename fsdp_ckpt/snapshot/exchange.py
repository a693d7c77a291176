"""Live memory against what is read for it, while the rest is still being read; and back again.

    verified bytes in the image  <-- swapped with -->  live memory

What is swapped once holds the other's bytes, so that a swap is its own undoing: until all ranks have agreed,
the image keeps what was live. Bytes move without the interpreter lock, block by block while they are in the
processor's cache.
"""

from __future__ import annotations

import ctypes
import threading
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

__all__ = ["Exchange", "Move", "extent_of", "overlapping"]

# Of the memory between the two, per thread: fits into the cache beside both.
BETWEEN_BYTES = 128 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Bytes of a file's data that belong into live memory, both in one run.

    Args:
        start: First byte of the file's data.
        target: Where they go: contiguous, on the CPU, of the bytes' own dtype.
    """

    start: int
    target: torch.Tensor

    @property
    def stop(self) -> int:
        """End of the bytes in the file's data."""
        return self.start + self.target.nbytes


class Exchange:
    """Swaps what arrives into live memory, from any thread.

    Args:
        moves: Rank whose file it is → its moves. Neither their bytes nor their targets overlap.
    """

    def __init__(self, moves: Mapping[int, Iterable[Move]]) -> None:
        self._moves = {rank: sorted(m, key=lambda move: move.start) for rank, m in moves.items()}
        self._starts = {rank: [move.start for move in m] for rank, m in self._moves.items()}
        self._swapped: list[tuple[int, int, int]] = []  # addresses in image and live memory, bytes
        self._between = threading.local()

    def take(self, rank: int, start: int, data: memoryview) -> None:
        """Swap a part of a file's data with the live memory that it is for.

        Args:
            rank: Whose file.
            start: First byte of the part, in the file's data.
            data: The part, in memory that outlives this object; each part is taken once.
        """
        moves = self._moves.get(rank)
        if not moves or not data:
            return
        stop = start + len(data)
        address = ctypes.addressof(ctypes.c_char.from_buffer(data))
        at = max(bisect_right(self._starts[rank], start) - 1, 0)
        while at < len(moves) and moves[at].start < stop:
            move = moves[at]
            first, last = max(start, move.start), min(stop, move.stop)
            if first < last:
                live = move.target.data_ptr() + first - move.start
                part = address + first - start, live, last - first
                self._swap(*part)
                self._swapped.append(part)
            at += 1

    def _swap(self, image: int, live: int, num_bytes: int) -> None:
        between = getattr(self._between, "memory", None)
        if between is None:
            between = self._between.memory = ctypes.create_string_buffer(BETWEEN_BYTES)
        spare = ctypes.addressof(between)
        for at in range(0, num_bytes, BETWEEN_BYTES):
            size = min(BETWEEN_BYTES, num_bytes - at)
            ctypes.memmove(spare, live + at, size)
            ctypes.memmove(live + at, image + at, size)
            ctypes.memmove(image + at, spare, size)

    def undo(self) -> None:
        """Give the live memory back what was in it; no thread may be taking any more."""
        while self._swapped:
            self._swap(*self._swapped.pop())

    def keep(self) -> None:
        """Leave the live memory as it is; there is no way back."""
        self._swapped.clear()
        for moves in self._moves.values():
            # As any change in place: autograd must refuse a graph that saw the old values.
            torch.autograd.graph.increment_version([move.target for move in moves])


def extent_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses between which a tensor's elements lie; empty where it has none."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    span = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (span + 1) * tensor.element_size()


def overlapping(ranges: Iterable[tuple[int, int]]) -> set[int]:
    """Return which of the half-open ranges, by their place in the order given, meet another one."""
    found: set[int] = set()
    furthest: tuple[int, int] | None = None  # end and place of the one that reaches furthest
    for start, stop, number in sorted((a, b, i) for i, (a, b) in enumerate(ranges) if a < b):
        if furthest is not None and start < furthest[0]:
            found |= {furthest[1], number}
        if furthest is None or stop > furthest[0]:
            furthest = stop, number
    return found
