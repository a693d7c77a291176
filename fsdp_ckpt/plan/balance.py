"""Who writes what exists more than once."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence

import numpy as np

from fsdp_ckpt.plan.layouts import Layout, ListedLayout

__all__ = ["assign_replicas"]


def assign_replicas(
    tensors: Sequence[tuple[int, tuple[int, ...], Layout]], world_size: int
) -> list[int]:
    """Choose, for every tensor, the replica whose ranks write it, so that bytes are balanced.

    Deterministic, so that every rank computes the same choice from the same tensors.

    Args:
        tensors: (bytes per element, shape, layout) per tensor.
        world_size: Number of ranks.

    Returns:
        One replica index per tensor; 0 where there is nothing to choose.

    Source: longest processing time first (Graham 1969), on top of what is written without a choice.
    """
    chosen = [0] * len(tensors)
    loads = np.zeros(world_size, np.int64)
    # A large model repeats few kinds of tensors many times.
    for (itemsize, shape, layout), count in Counter(t for t in tensors if t[2].num_replicas == 1).items():
        _add_load(loads, layout, shape, 0, itemsize * count)
    sizes = [itemsize * int(np.prod(shape, dtype=np.int64)) for itemsize, shape, _ in tensors]
    queues: dict[Layout, list[tuple[int, int]]] = {}
    for i in sorted(range(len(tensors)), key=lambda i: (-sizes[i], i)):
        itemsize, shape, layout = tensors[i]
        if isinstance(layout, ListedLayout) or layout.num_replicas == 1:
            continue
        groups = layout.replica_ranks
        if layout not in queues:
            queues[layout] = [(int(loads[group].max()), r) for r, group in enumerate(groups)]
            heapq.heapify(queues[layout])
        queue = queues[layout]
        # A replica's load grows behind the queue's back when another layout shares its ranks.
        while (load := int(loads[groups[queue[0][1]]].max())) > queue[0][0]:
            heapq.heapreplace(queue, (load, queue[0][1]))
        chosen[i] = queue[0][1]
        _add_load(loads, layout, shape, chosen[i], itemsize)
    return chosen


def _add_load(
    loads: np.ndarray, layout: Layout, shape: tuple[int, ...], replica: int, itemsize: int
) -> None:
    chunks = layout.chunks(shape, replica)
    np.add.at(loads, chunks.ranks, chunks.sizes.prod(axis=1) * itemsize)
