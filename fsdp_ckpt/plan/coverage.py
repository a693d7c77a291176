"""Proof that chunks cover a tensor: every element exactly once."""

from __future__ import annotations

import math

import numpy as np

from fsdp_ckpt.errors import CorruptCheckpointError
from fsdp_ckpt.plan.layouts import Chunks, FlatLayout, Layout, MeshLayout

__all__ = ["check_coverage"]


def check_coverage(name: str, shape: tuple[int, ...], layout: Layout, replica: int) -> None:
    """Prove that the layout's chunks cover the tensor.

    Mesh and flat layouts cover by construction (each cut partitions what it cuts), given dims to cut and
    shards enough; listed chunks are proven.

    Raises:
        CorruptCheckpointError: An element is missing, held twice, or outside the tensor.
        UnencodableStateError: A strided shard that matches no axes of its mesh.

    Source: disjoint boxes inside the tensor cover it if and only if their volumes add up to its own.
    """
    if not 0 <= replica < layout.num_replicas:
        raise CorruptCheckpointError(
            f"{name}: replica {replica} of {layout.num_replicas}", key=name
        )
    if isinstance(layout, MeshLayout):
        if layout.min_ndim > len(shape):
            raise CorruptCheckpointError(
                f"{name}: a placement on dim {layout.min_ndim - 1} of {len(shape)} dims", key=name
            )
        return
    if isinstance(layout, FlatLayout):
        stop, held = layout.start + math.prod(shape), layout.mesh.shape[1] * layout.shard_elements
        if stop > held:
            raise CorruptCheckpointError(
                f"{name}: elements {layout.start} to {stop} of a flat group of {held}", key=name
            )
        return
    chunks = layout.chunks(shape, replica)
    # offsets + sizes could overflow.
    beyond = chunks.offsets > np.array(shape, np.int64) - chunks.sizes
    if (chunks.offsets < 0).any() or (chunks.sizes < 0).any() or beyond.any():
        raise CorruptCheckpointError(f"{name}: a chunk lies outside shape {shape}", key=name)
    pair = _overlapping_pair(chunks)
    if pair is not None:
        raise CorruptCheckpointError(
            f"{name}: chunks {chunks.box(pair[0])} and {chunks.box(pair[1])} overlap", key=name
        )
    held = sum(math.prod(sizes) for sizes in chunks.sizes.tolist())
    if held != math.prod(shape):
        raise CorruptCheckpointError(
            f"{name}: the chunks hold {held} of {math.prod(shape)} elements", key=name
        )


def _overlapping_pair(chunks: Chunks) -> tuple[int, int] | None:
    """Sweep along the dim with most distinct starts; compare only chunks that are open together."""
    if len(chunks) < 2:
        return None
    if chunks.offsets.shape[1] == 0:
        return 0, 1
    sweep = max(range(chunks.offsets.shape[1]), key=lambda d: len(np.unique(chunks.offsets[:, d])))
    stops = chunks.offsets + chunks.sizes
    open_chunks: list[int] = []
    for i in np.argsort(chunks.offsets[:, sweep], kind="stable").tolist():
        open_chunks = [j for j in open_chunks if stops[j, sweep] > chunks.offsets[i, sweep]]
        for j in open_chunks:
            if ((chunks.offsets[i] < stops[j]) & (chunks.offsets[j] < stops[i])).all():
                return j, i
        open_chunks.append(i)
    return None
