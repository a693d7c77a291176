"""Which rank reads, sends, receives and writes what in a consolidation on several ranks. Pure arithmetic.

    source files  --balanced by bytes-->  readers: each file has one
    output files  --balanced by bytes-->  owners: each file has one

In a round every owner has one window of a file of its own. Who reads a source file sends what the window
needs of it, piece by piece in an order that both sides compute alike, so no plan travels.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fsdp_ckpt.hf.copying import wants_of
from fsdp_ckpt.hf.layout import OutputFile
from fsdp_ckpt.hf.planning import Plan
from fsdp_ckpt.hf.source import Want
from fsdp_ckpt.plan.box import overlap

__all__ = ["Round", "Window", "plan_rounds", "share_out"]


@dataclass(frozen=True, slots=True)
class Window:
    """The bytes [start, stop) of a file."""

    file: OutputFile
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Round:
    """One window per owner that still has one.

    Args:
        windows: Owner → its window.
        pieces: (Reader, owner) → what the one sends to the other, back to back, ``byte_offset`` counted in
            what is sent; and for each piece the want of the window that it belongs to.
    """

    windows: dict[int, Window]
    pieces: dict[tuple[int, int], list[tuple[Want, Want]]]

    def sent_bytes(self, reader: int, owner: int) -> int:
        """Return how many bytes ``reader`` sends to ``owner``."""
        pieces = self.pieces.get((reader, owner))
        return pieces[-1][0].byte_offset + pieces[-1][0].num_bytes if pieces else 0


def share_out(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Give every item to a rank, so that bytes are balanced.

    Returns:
        One rank per item.

    Source: longest processing time first (Graham 1969).
    """
    ranks = [0] * len(sizes)
    loads = [(0, rank) for rank in range(num_ranks)]
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        load, rank = loads[0]
        ranks[i] = rank
        heapq.heapreplace(loads, (load + sizes[i], rank))
    return ranks


def plan_rounds(
    plan: Plan,
    files: Sequence[OutputFile],
    owners: Sequence[int],
    readers: Sequence[int],
    window_bytes: int,
) -> Iterator[Round]:
    """Plan all rounds, in order.

    Args:
        plan: What the files consist of.
        files: Those to write.
        owners: One rank per file.
        readers: One rank per source file.
        window_bytes: Of a window.
    """
    queues = {
        owner: _windows([f for f, o in zip(files, owners, strict=True) if o == owner], window_bytes)
        for owner in sorted(set(owners))
    }
    while True:
        found = {owner: next(queue, None) for owner, queue in queues.items()}
        windows = {owner: window for owner, window in found.items() if window is not None}
        if not windows:
            return
        pieces: dict[tuple[int, int], list[tuple[Want, Want]]] = {}
        for owner, window in windows.items():
            for source, piece, want in _pieces(plan, window):
                sent = pieces.setdefault((readers[source], owner), [])
                at = sent[-1][0].byte_offset + sent[-1][0].num_bytes if sent else 0
                # Elements in the buffer of what is sent are aligned for any dtype.
                sent.append((replace(piece, byte_offset=-(-at // 8) * 8), want))
        yield Round(windows, pieces)


def _windows(files: Sequence[OutputFile], window_bytes: int) -> Iterator[Window]:
    return itertools.chain.from_iterable(
        (
            Window(file, start, min(start + window_bytes, file.num_bytes))
            for start in range(0, file.num_bytes, window_bytes)
        )
        for file in files
    )


def _pieces(plan: Plan, window: Window) -> Iterator[tuple[int, Want, Want]]:
    """Yield (rank whose file, the piece, the want that it is of); from the manifest alone."""
    for want in wants_of(plan, window.file, window.start, window.stop):
        for source, chunk in want.row.overlapping(want.box):
            box = overlap(chunk, want.box)
            if box is not None:
                yield source, replace(want, box=box), want
