"""Who writes what exists more than once."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from fsdp_ckpt.plan.layouts import Layout, ListedLayout

__all__ = ["assign_replicas"]


def assign_replicas(tensors: Sequence[tuple[int, Layout]], world_size: int) -> list[int]:
    """Choose, for every tensor, the replica whose ranks write it, so that bytes are balanced.

    Deterministic, so that every rank computes the same choice from the same tensors.

    Args:
        tensors: (bytes, layout) per tensor.
        world_size: Number of ranks.

    Returns:
        One replica index per tensor; 0 where there is nothing to choose.

    Source: longest processing time first (Graham 1969).
    """
    chosen = [0] * len(tensors)
    loads = np.zeros(world_size)
    queues: dict[Layout, list[tuple[float, int]]] = {}
    for i in sorted(range(len(tensors)), key=lambda i: (-tensors[i][0], i)):
        num_bytes, layout = tensors[i]
        if isinstance(layout, ListedLayout) or layout.num_replicas == 1:
            continue
        groups = layout.replica_ranks
        queue = queues.setdefault(layout, [(0.0, r) for r in range(layout.num_replicas)])
        # A replica's load grows behind the queue's back when another layout shares its ranks.
        while (load := float(loads[groups[queue[0][1]]].max())) > queue[0][0]:
            heapq.heapreplace(queue, (load, queue[0][1]))
        replica = chosen[i] = queue[0][1]
        loads[groups[replica]] += num_bytes / groups.shape[1]
    return chosen
