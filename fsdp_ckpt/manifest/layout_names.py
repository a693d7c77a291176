"""Layouts in a word, as people at a terminal read them."""

from __future__ import annotations

from collections import Counter

from fsdp_ckpt.manifest.rows import TensorRow
from fsdp_ckpt.manifest.schema import Manifest
from fsdp_ckpt.plan.layouts import FlatLayout, ListedLayout

__all__ = ["layout_name", "prevailing_layout"]


def layout_name(row: TensorRow) -> str:
    """Return ``S0 over 8``, ``R,S0 over 2x4`` (one placement per axis of the mesh), or who holds it."""
    if isinstance(row.layout, ListedLayout):
        ranks = sorted({rank for rank, _ in row.layout.listed})
        return f"rank {ranks[0]}" if len(ranks) == 1 else f"listed, {len(row.layout.listed)} chunks"
    if isinstance(row.layout, FlatLayout):
        shards = row.layout.mesh.shape[1]
        return f"flat over {shards}, {row.layout.shard_elements} elements each"
    if all(placement.dim is None for placement in row.layout.placements):
        return f"rank {row.layout.replica_ranks[row.replica][0]}"
    placements = ",".join(map(str, row.layout.placements))
    return f"{placements} over {'x'.join(map(str, row.layout.mesh.shape))}"


def prevailing_layout(manifest: Manifest) -> str:
    """Return the layout that holds the most bytes, such as ``S0 over 8``; ``none`` without tensors."""
    held: Counter[str] = Counter()
    for row in manifest.tensors:
        held[_kind(row)] += row.num_bytes
    return max(held, key=lambda kind: held[kind], default="none")


def _kind(row: TensorRow) -> str:
    layout = row.layout
    if isinstance(layout, ListedLayout):
        return "listed" if len({rank for rank, _ in layout.listed}) > 1 else "unsharded"
    if isinstance(layout, FlatLayout):
        return f"flat over {layout.mesh.shape[1]}"
    if all(placement.dim is None for placement in layout.placements):
        return "unsharded"
    return layout_name(row)
