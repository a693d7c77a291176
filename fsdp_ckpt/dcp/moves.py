"""Which pieces of a load can be swapped with live memory as they arrive.

Those that are one run of bytes in the file and in host memory, of one dtype. The others, and all that share
bytes with another piece or memory with another target, are copied after the ranks have agreed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from fsdp_ckpt.commit.checkpoint import Piece
from fsdp_ckpt.commit.source_images import INLINE
from fsdp_ckpt.dcp.live import torch_dtype
from fsdp_ckpt.snapshot.exchange import Move, extent_of, overlapping

__all__ = ["by_rank", "plan_moves"]


@torch.no_grad()
def plan_moves(pieces: Sequence[tuple[ReadItem, Piece]], planner: LoadPlanner) -> dict[int, Move]:
    """Return the moves of those pieces that can be swapped, by their place in ``pieces``."""
    spans, targets = [piece.byte_range for _, piece in pieces], []
    for item, _ in pieces:
        is_tensor = item.type == LoadItemType.TENSOR
        targets.append(planner.resolve_tensor(item).detach() if is_tensor else None)
    places = [(0, 0) if t is None or t.device.type != "cpu" else extent_of(t) for t in targets]
    # One line of bytes for all files: each begins far behind the one before.
    files = [((piece.rank + 1) << 64) for _, piece in pieces]
    sources = [(at + a, at + b) for at, (a, b) in zip(files, spans, strict=True)]
    shared = overlapping(places) | overlapping(sources)
    return {
        number: Move(start=spans[number][0], target=target)
        for number, target in enumerate(targets)
        if target is not None and number not in shared and _is_one_run(pieces[number][1], target)
    }


def by_rank(
    pieces: Sequence[tuple[ReadItem, Piece]], moves: Mapping[int, Move]
) -> dict[int, list[Move]]:
    """Return the moves by the rank whose file they are of."""
    found: dict[int, list[Move]] = defaultdict(list)
    for number, move in moves.items():
        found[pieces[number][1].rank].append(move)
    return dict(found)


def _is_one_run(piece: Piece, target: torch.Tensor) -> bool:
    start, stop = piece.byte_range
    return (
        piece.rank != INLINE
        and target.device.type == "cpu"
        and target.dtype == torch_dtype(piece.entry.dtype)
        and target.is_contiguous()
        and not (target.is_conj() or target.is_neg())
        and stop - start == target.nbytes > 0
    )
