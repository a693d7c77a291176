"""The state of one part as each saving rank had it: for sharing it out to another number of ranks."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import torch

from fsdp_ckpt.commit.checkpoint import Checkpoint, Piece
from fsdp_ckpt.dcp.live import CODEC, EXTENSIONS, dtype_name, torch_dtype
from fsdp_ckpt.dcp.pieces import piece_tensor
from fsdp_ckpt.dcp.state_view import bytes_of
from fsdp_ckpt.manifest.tree import Path, path_name
from fsdp_ckpt.manifest.typed_json import Codec, Extension, Json
from fsdp_ckpt.plan.box import Box
from fsdp_ckpt.state.saved import subtree

__all__ = ["PART_CODEC", "part_state"]


def _encode_tensor(tensor: torch.Tensor, key: str) -> dict[str, Json]:
    data = base64.b64encode(bytes_of(tensor)).decode()
    return {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "v": data}


def _decode_tensor(fields: Mapping[str, Json]) -> torch.Tensor:
    data = torch.frombuffer(bytearray(base64.b64decode(fields["v"]) or b"\0"), dtype=torch.uint8)
    dtype = torch_dtype(fields["dtype"])
    if not fields["v"]:
        return torch.empty(fields["shape"], dtype=dtype)
    return data.view(dtype).view(fields["shape"])


# Such states are small, and travel between ranks: their tensors go along.
PART_CODEC = Codec(
    [
        *EXTENSIONS,
        Extension(
            tag="torch.Tensor",
            matches=lambda value: isinstance(value, torch.Tensor),
            encode=_encode_tensor,
            decode=_decode_tensor,
        ),
    ]
)


def part_state(checkpoint: Checkpoint, rank: int, *prefix: str) -> Any:
    """Return what ``rank`` had saved below ``prefix``: its own where it differed, else the global content.

    Raises:
        CorruptCheckpointError: A file that holds it is damaged.
    """
    manifest, header = checkpoint.manifest, checkpoint.header(rank)
    inside = len(prefix)
    leaves: dict[Path, Any] = {}
    pieces: dict[Path, Piece] = {}
    for path, value in (*manifest.values.items(), *header.values.items()):
        if path[:inside] == prefix:
            leaves[path] = CODEC.decode(value)
    for row in manifest.tensors:
        if row.path[:inside] == prefix:
            own = checkpoint.own_piece(rank, row.name)
            found = [own] if own else checkpoint.pieces(row, Box.whole(row.shape))
            if len(found) == 1:
                pieces[row.path] = found[0]
            else:  # no elements, or shards, which are not a rank's own
                leaves[row.path] = torch.empty(row.shape, dtype=torch_dtype(row.dtype))
    for path in manifest.own_paths:
        own = checkpoint.own_piece(rank, path_name(path)) if path[:inside] == prefix else None
        if own:
            pieces[path] = own
    images = checkpoint.read(pieces.values())
    leaves.update({path: piece_tensor(images, piece).clone() for path, piece in pieces.items()})
    return subtree(leaves, *prefix)
