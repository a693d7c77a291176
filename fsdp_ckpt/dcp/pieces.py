"""Pieces of a checkpoint in the terms of torch and DCP."""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.planner import ReadItem

from fsdp_ckpt.commit.checkpoint import Piece, SourceImages
from fsdp_ckpt.commit.rank_pieces import PieceFinder
from fsdp_ckpt.dcp.live import torch_dtype
from fsdp_ckpt.plan.box import Box

__all__ = ["item_piece", "piece_tensor"]


def item_piece(finder: PieceFinder, item: ReadItem) -> Piece:
    """Return where the bytes of one item lie; they come from one file."""
    start = tuple(item.storage_index.offset or ())
    offsets = tuple(a + b for a, b in zip(start, item.storage_offsets, strict=True))
    return finder.region_piece(item.storage_index.fqn, Box(offsets, tuple(item.lengths)))


def piece_tensor(images: SourceImages, piece: Piece) -> torch.Tensor:
    """Return a piece as a host tensor over the image's memory, shape ``piece.region.sizes``."""
    data = torch.from_numpy(images.array(piece))
    return data.view(torch_dtype(piece.entry.dtype)).squeeze(-1)
