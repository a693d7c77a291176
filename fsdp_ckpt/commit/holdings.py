"""Which tensors a file, or a part of one, holds: for messages, so in bounded time and length."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_ckpt.manifest.schema import Manifest
from fsdp_ckpt.manifest.shard import ShardHeader
from fsdp_ckpt.plan.layouts import ListedLayout

__all__ = ["held_tensors", "list_names", "names_between"]

MAX_ROWS = 100_000
MAX_NAME = 200


def held_tensors(manifest: Manifest, rank: int) -> list[str]:
    """Return the names of the tensors in a rank's file, from the first 100,000 rows of the manifest."""
    held: list[str] = []
    # Rows that share a long list of chunks have one shape, so one look is enough.
    looked_up: dict[int, bool] = {}
    for row in manifest.tensors[:MAX_ROWS]:
        layout = row.layout
        is_held = looked_up.get(id(layout))
        if is_held is None:
            boxes = layout.boxes_of(row.shape, rank)
            is_held = bool(boxes) and layout.replica_of(rank) == row.replica
            if isinstance(layout, ListedLayout):
                looked_up[id(layout)] = is_held
        if is_held:
            held.append(row.name)
    return held


def names_between(header: ShardHeader, start: int, stop: int) -> list[str]:
    """Return the names of the entries that have bytes in [start, stop) of a file's data."""
    return [
        e.name
        for e in header.layout.entries
        if e.byte_offset < stop and start < e.byte_offset + e.num_bytes
    ]


def list_names(names: Sequence[str]) -> str:
    """Return the first three names and how many more there are."""
    shown = ", ".join(n if len(n) <= MAX_NAME else f"{n[:MAX_NAME]}..." for n in names[:3])
    if len(names) > 3:
        return f"{shown} and {len(names) - 3} more tensors"
    return shown or "no tensors"
