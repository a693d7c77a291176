"""Who writes what exists more than once."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from fsdp_ckpt.plan.chunks import Ints
from fsdp_ckpt.plan.layouts import FlatLayout, Layout, ListedLayout, MeshLayout

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
    held: dict[tuple[Layout, tuple[int, ...]], Ints] = {}
    # A large model repeats few kinds of tensors many times.
    for (itemsize, shape, layout), count in Counter(
        t for t in tensors if t[2].num_replicas == 1
    ).items():
        if isinstance(layout, ListedLayout):
            for rank, box in layout.listed:
                loads[rank] += box.num_elements * itemsize * count
        else:
            loads[layout.replica_ranks[0]] += _held(held, layout, shape) * itemsize * count
    sizes = [itemsize * math.prod(shape) for itemsize, shape, _ in tensors]
    queues: dict[Layout, list[tuple[int, int]]] = {}
    for i in sorted(range(len(tensors)), key=lambda i: -sizes[i]):
        itemsize, shape, layout = tensors[i]
        if isinstance(layout, ListedLayout) or layout.num_replicas == 1:
            continue
        groups = layout.replica_ranks
        if layout not in queues:
            queues[layout] = [
                (load, r) for r, load in enumerate(loads[groups].max(axis=1).tolist())
            ]
            heapq.heapify(queues[layout])
        queue = queues[layout]
        # A replica's load grows behind the queue's back when another layout shares its ranks.
        while (load := int(loads[groups[queue[0][1]]].max())) > queue[0][0]:
            heapq.heapreplace(queue, (load, queue[0][1]))
        chosen[i] = queue[0][1]
        loads[groups[chosen[i]]] += _held(held, layout, shape) * itemsize
    return chosen


def _held(
    known: dict[tuple[Layout, tuple[int, ...]], Ints],
    layout: MeshLayout | FlatLayout,
    shape: tuple[int, ...],
) -> Ints:
    """Return how many elements the ranks of a replica hold, by their place in it; alike in every replica."""
    if (layout, shape) not in known:
        chunks = layout.chunks(shape, 0)
        elements = np.zeros(layout.max_rank + 1, np.int64)
        np.add.at(elements, chunks.ranks, chunks.sizes.prod(axis=1))
        known[layout, shape] = elements[layout.replica_ranks[0]]
    return known[layout, shape]
