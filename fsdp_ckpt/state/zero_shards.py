"""What this rank holds of a DeepSpeed engine's parameters: its part of the masters, without any collective.

    stages 1, 2   the tensors of a group one after the other, cut into one partition per rank
        | first .......... | second ................. | third | pad |
        |     rank 0     |     rank 1     |     rank 2     |
    stage 3       every tensor cut by itself; a rank's pieces of many tensors one after the other
        | first: rank 0 | rank 1 | rank 2 |  | second: rank 0 | rank 1 | rank 2 |

Invariant: a partition is the flat tensor that the engine's inner optimizer steps, so masters and moments are
cut alike. The model's own parameters, in 16 bits or whole, follow from the masters after every step; only
those that are never stepped are read themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_ckpt.plan.flat import FlatLayout
from fsdp_ckpt.plan.mesh import Mesh
from fsdp_ckpt.state.local_shards import LocalShards

__all__ = ["MasterPart", "MasterPartition", "frozen_shards", "master_partitions"]


@dataclass(frozen=True, slots=True)
class MasterPart:
    """One tensor's elements in a partition.

    Args:
        parameter: The model's parameter.
        shape: Its global shape.
        layout: Which of its elements which rank holds.
        start: Where this rank's begin in its partition.
        stop: Where they end.
    """

    parameter: nn.Parameter
    shape: tuple[int, ...]
    layout: FlatLayout
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class MasterPartition:
    """This rank's part of some tensors' masters, in one flat tensor.

    Args:
        flat: Shape (n,); the inner optimizer's parameter. Ends in padding.
        group: Index of its parameter group.
        rank: This rank.
        parts: The tensors in it, those of which this rank has nothing too.
    """

    flat: torch.Tensor
    group: int
    rank: int
    parts: tuple[MasterPart, ...]

    def shards(self) -> Iterator[tuple[nn.Parameter, LocalShards]]:
        """Yield each parameter and this rank's part of its master; shares memory."""
        for part in self.parts:
            local = self.flat.detach()[part.start : part.stop]
            yield part.parameter, LocalShards.of(part.shape, part.layout, self.rank, local)


def master_partitions(zero: Any) -> list[MasterPartition]:
    """Return the partitions of a ZeRO optimizer of DeepSpeed; reads only.

    Args:
        zero: ``engine.optimizer``: ``DeepSpeedZeroOptimizer_Stage3``, ``DeepSpeedZeroOptimizer`` or
            ``BF16_Optimizer``.
    """
    mesh = _mesh(zero.dp_process_group)
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        return _tensor_by_tensor(zero, mesh)
    if hasattr(zero, "bf16_groups_flat"):
        groups = (zero.bf16_groups, zero.bf16_groups_flat, zero.fp32_groups_flat_partition)
    else:
        groups = (zero.bit16_groups, zero.bit16_groups_flat, zero.single_partition_of_fp32_groups)
    return [
        _of_group(i, parameters, whole, flat, mesh)
        for i, (parameters, whole, flat) in enumerate(zip(*groups, strict=True))
    ]


def frozen_shards(parameter: Any, group: dist.ProcessGroup) -> LocalShards:
    """Return this rank's part of a stage 3 parameter that has no master.

    Args:
        parameter: With DeepSpeed's ``ds_tensor``.
        group: The ranks that share it.
    """
    shape = tuple(parameter.ds_shape)
    layout = FlatLayout(_mesh(group), max(parameter.partition_numel(), 1))
    rank = dist.get_rank()
    low, high = layout.range_of(shape, rank)
    local = parameter.ds_tensor.detach().view(-1)[: high - low]
    return LocalShards.of(shape, layout, rank, local)


def _mesh(group: dist.ProcessGroup) -> Mesh:
    ranks = dist.get_process_group_ranks(group)
    return Mesh((1, len(ranks)), tuple(ranks))


def _of_group(
    index: int, parameters: Any, whole: torch.Tensor, flat: torch.Tensor, mesh: Mesh
) -> MasterPartition:
    """Stages 1 and 2. The parameters are views of ``whole``: order and alignment are read from there."""
    rank = dist.get_rank()
    first = mesh.positions[rank] * flat.numel()
    parts = []
    for parameter in parameters:
        shape = tuple(parameter.shape)
        begin = parameter.storage_offset() - whole.storage_offset()
        layout = FlatLayout(mesh, flat.numel(), begin)
        low, high = layout.range_of(shape, rank)
        start = max(begin - first, 0) if low < high else 0
        parts.append(MasterPart(parameter, shape, layout, start, start + high - low))
    return MasterPartition(flat, index, rank, tuple(parts))


def _tensor_by_tensor(zero: Any, mesh: Mesh) -> list[MasterPartition]:
    """Stage 3, whose groups come in sub-groups of bounded size."""
    rank = dist.get_rank()
    found = []
    for i, (parameters, flat) in enumerate(
        zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True)
    ):
        start, parts = 0, []
        for parameter in parameters:
            shape, num_elements = tuple(parameter.ds_shape), parameter.partition_numel()
            layout = FlatLayout(mesh, max(num_elements, 1))
            low, high = layout.range_of(shape, rank)
            parts.append(MasterPart(parameter, shape, layout, start, start + high - low))
            start += num_elements
        found.append(MasterPartition(flat, zero.sub_group_to_group_id[i], rank, tuple(parts)))
    return found
