"""FSDP1's flat parameters: what this rank's shard holds of which tensor, without any collective.

    unsharded flat parameter   | weight ...... | bias | pad | weight ........ | pad to a multiple of shards |
    this rank's shard                   |                |

Everything is read from ``FullyShardedDataParallel``'s handle: names, shapes, paddings, the local shard.
Its own ``state_dict`` gathers whole tensors, and on CPU with ``offload_to_cpu=True`` gathers wrong ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_ckpt.errors import MismatchError
from fsdp_ckpt.plan.flat import FlatLayout
from fsdp_ckpt.plan.mesh import Mesh
from fsdp_ckpt.state.local_shards import LocalShards
from fsdp_ckpt.state.names import canonical_name

__all__ = ["FlatPart", "FlatUnit", "flat_units", "free_gathered"]


@dataclass(frozen=True, slots=True)
class FlatPart:
    """One tensor of a flat parameter.

    Args:
        name: The tensor's name.
        shape: Its global shape.
        layout: Its place in the flat group.
        offset_in_shard: Where its elements begin in this rank's shard.
        parameter: The live parameter that shows it, with ``use_orig_params=True``.
    """

    name: str
    shape: tuple[int, ...]
    layout: FlatLayout
    offset_in_shard: int
    parameter: nn.Parameter | None


@dataclass(frozen=True, slots=True)
class FlatUnit:
    """One flat parameter.

    Args:
        flat_param: The live parameter.
        local: This rank's shard, shape (elements per shard,); shares memory.
        rank: This rank.
        parts: The tensors in it.
        tied: Further name → name of the part that is the same tensor.
    """

    flat_param: nn.Parameter
    local: torch.Tensor
    rank: int
    parts: tuple[FlatPart, ...]
    tied: dict[str, str]

    def tensors(self) -> dict[str, LocalShards]:
        """Return name → this rank's elements."""
        found = {}
        for part in self.parts:
            low, high = part.layout.range_of(part.shape, self.rank)
            local = self.local[part.offset_in_shard : part.offset_in_shard + high - low]
            found[part.name] = LocalShards.of(part.shape, part.layout, self.rank, local)
        return found


def flat_units(model: nn.Module) -> list[FlatUnit]:
    """Return the flat parameters of every ``FullyShardedDataParallel`` module in ``model``; reads only."""
    # Found without importing FSDP1, which most models do not use.
    handles = [h for m in model.modules() if (h := getattr(m, "_handle", None)) is not None]
    if not handles:
        return []
    paths = {id(m): path for path, m in model.named_modules(remove_duplicate=False)}
    owners = [m for m in model.modules() if getattr(m, "_handle", None) is not None]
    return [
        _unit(owner, handle, model, paths) for owner, handle in zip(owners, handles, strict=True)
    ]


def free_gathered(model: nn.Module) -> None:
    """Free what a forward without backward has left gathered: the next one would use it, not the shards."""
    handles = (h for m in model.modules() if (h := getattr(m, "_handle", None)) is not None)
    for handle in handles:
        # Before the first forward there is nothing to free.
        if handle.uses_sharded_strategy and hasattr(handle.flat_param, "_local_shard"):
            handle.reshard(free_unsharded_flat_param=True)


def _unit(owner: Any, handle: Any, model: nn.Module, paths: dict[int, str]) -> FlatUnit:
    flat_param = handle.flat_param
    mesh = _mesh(owner, handle)
    rank = dist.get_rank()
    # Before the first forward the flat parameter itself is the shard.
    local = getattr(flat_param, "_local_shard", flat_param).detach()
    shard_elements = local.numel()
    shard = mesh.positions[rank] % mesh.shape[1]
    shown = flat_param._params or [None] * flat_param._num_params
    parts = []
    starts = _starts(flat_param)
    for start, shape, info, parameter in zip(
        starts, flat_param._shapes, flat_param._param_infos, shown, strict=True
    ):
        parts.append(
            FlatPart(
                name=_name(model, paths, info.module, info.param_name),
                shape=tuple(shape),
                layout=FlatLayout(mesh, shard_elements, start),
                offset_in_shard=max(start - shard * shard_elements, 0),
                parameter=parameter,
            )
        )
    tied = {
        _name(model, paths, info.module, info.param_name): _name(
            model, paths, info.prim_module, info.prim_param_name
        )
        for info in flat_param._shared_param_infos
    }
    return FlatUnit(flat_param, local, rank, tuple(parts), tied)


def _name(model: nn.Module, paths: dict[int, str], module: nn.Module, name: str) -> str:
    path = paths[id(module)]
    return canonical_name(model, f"{path}.{name}" if path else name)


def _starts(flat_param: Any) -> list[int]:
    """Return where each tensor begins; alignment may put padding between them."""
    starts, position = [], 0
    for num_elements, is_padding in zip(
        flat_param._numels_with_padding, flat_param._is_padding_mask, strict=True
    ):
        if not is_padding:
            starts.append(position)
        position += num_elements
    return starts


def _mesh(owner: Any, handle: Any) -> Mesh:
    """Return the ranks as (replicas, shards); a hybrid strategy's rows are alike."""
    shards = dist.get_process_group_ranks(handle.process_group)
    if not handle.uses_sharded_strategy:
        return Mesh((len(shards), 1), tuple(shards))
    across = getattr(owner, "_inter_node_pg", None)
    if across is None:
        return Mesh((1, len(shards)), tuple(shards))
    here = dist.get_rank()
    replicas = dist.get_process_group_ranks(across)
    ranks = tuple(replica - here + shard for replica in replicas for shard in shards)
    if len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(dist.get_world_size())):
        raise MismatchError(
            f"FSDP1's shard group {shards} and replica group {replicas} form no regular grid of ranks"
        )
    return Mesh((len(replicas), len(shards)), ranks)
