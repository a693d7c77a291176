"""A manifest in the terms of the live state."""

from __future__ import annotations

import xxhash
from torch.distributed.tensor import Placement, Replicate, Shard

from fsdp_ckpt.dcp.live import CODEC, torch_dtype
from fsdp_ckpt.manifest.schema import Manifest, TensorRow
from fsdp_ckpt.plan.layouts import MeshLayout
from fsdp_ckpt.state.saved import SavedState, SavedTensor

__all__ = ["saved_state"]


def saved_state(manifest: Manifest) -> SavedState:
    """Describe a checkpoint's content to :meth:`~fsdp_ckpt.state.TrainState.plan_restore`."""
    return SavedState(
        tensors={
            row.path: SavedTensor(row.shape, torch_dtype(row.dtype), _placements(row))
            for row in manifest.tensors
        },
        values={path: CODEC.decode(value) for path, value in manifest.values.items()},
        own=frozenset(manifest.own_paths),
        varying=frozenset(manifest.varying),
        world_size=manifest.world_size,
        seed=xxhash.xxh3_64_intdigest(manifest.attempt.encode()),
    )


def _placements(row: TensorRow) -> tuple[Placement, ...] | None:
    layout = row.layout
    if not isinstance(layout, MeshLayout) or all(p.dim is None for p in layout.placements):
        return None
    return tuple(Replicate() if p.dim is None else Shard(p.dim) for p in layout.placements)
