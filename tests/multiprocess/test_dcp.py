"""The plugin under plain ``dcp.save`` and ``dcp.load``, on real ranks and every kind of DTensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from fsdp_ckpt import (
    ReshardLoadPlanner,
    ShardedStorageReader,
    ShardedStorageWriter,
    ShardSavePlanner,
)
from fsdp_ckpt.testing import run_ranks
from tests.jobs import full

SHAPES = [(7, 6), (3,), (1,), (), (0, 4), (2, 5, 3), (13, 2)]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64]


def meshes() -> tuple[DeviceMesh, DeviceMesh | None]:
    world_size = dist.get_world_size()
    flat = init_device_mesh("cpu", (world_size,))
    square = init_device_mesh("cpu", (2, world_size // 2)) if world_size % 2 == 0 else None
    return flat, square


def layouts() -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """Return functions full tensor → the same tensor in a layout."""
    flat, square = meshes()

    def on(mesh: DeviceMesh, *placements: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        def lay(tensor: torch.Tensor) -> torch.Tensor:
            fitting = [
                Replicate() if isinstance(p, Shard) and p.dim >= tensor.ndim else p
                for p in placements
            ]
            return distribute_tensor(tensor, mesh, fitting)

        return lay

    found = [lambda tensor: tensor, on(flat, Shard(0)), on(flat, Shard(1)), on(flat, Replicate())]
    if square is not None:
        found += [
            on(square, Replicate(), Shard(0)),
            on(square, Shard(0), Replicate()),
            on(square, Shard(0), Shard(1)),
            on(square, Shard(1), Shard(0)),
            on(square, Shard(0), Shard(0)),
        ]
    return found


def original(i: int) -> torch.Tensor:
    shape, dtype = SHAPES[i % len(SHAPES)], DTYPES[i % len(DTYPES)]
    generator = torch.Generator().manual_seed(i)
    return torch.randint(-100, 100, shape, generator=generator).to(dtype)


def state(shift: int, *, blank: bool) -> dict[str, Any]:
    lays = layouts()
    tensors = {}
    for i in range(len(SHAPES) * len(DTYPES)):
        value = torch.zeros_like(original(i)) if blank else original(i)
        tensors[f"t{i}"] = lays[(i + shift) % len(lays)](value)
    return {
        "model": tensors,
        "note": {"step": 0 if blank else 5, "who": ("x",) if not blank else None},
    }


def wrong_tensors(loaded: dict[str, Any]) -> list[str]:
    return [
        name
        for name, tensor in loaded["model"].items()
        if not torch.equal(full(tensor), original(int(name[1:])))
    ]


def save_all(root: str) -> None:
    for shift in range(9):
        writer = ShardedStorageWriter(f"{root}/{shift}")
        dcp.save(state(shift, blank=False), storage_writer=writer, planner=ShardSavePlanner())


def load_all(root: str) -> list[Any]:
    wrong = []
    for saved in range(9):
        target = state(2 * saved + 1, blank=True)
        reader = ShardedStorageReader(f"{root}/{saved}")
        dcp.load(target, storage_reader=reader, planner=ReshardLoadPlanner())
        wrong.append([wrong_tensors(target), target["note"]])
    return wrong


@pytest.mark.parametrize(("saving", "loading"), [(4, 4), (4, 3), (2, 4)])
def test_any_sharding_loads_into_any_other(tmp_path: Path, saving: int, loading: int) -> None:
    """Tensors of every dtype and odd shape, saved in nine layouts, come back whole in other ones."""
    run_ranks(save_all, saving, str(tmp_path))
    for value in run_ranks(load_all, loading, str(tmp_path)).values:
        assert value == [[[], {"step": 5, "who": ("x",)}]] * 9


def with_default_planners(root: str) -> list[Any]:
    found = []
    for saved, planner in enumerate((None, ShardSavePlanner())):
        writer = ShardedStorageWriter(f"{root}/{saved}")
        dcp.save(state(1, blank=False), storage_writer=writer, planner=planner)
        for load_planner in (None, ReshardLoadPlanner()):
            target = state(3, blank=True)
            reader = ShardedStorageReader(f"{root}/{saved}")
            dcp.load(target, storage_reader=reader, planner=load_planner)
            found.append([wrong_tensors(target), target["note"]])
    return found


def test_each_works_alone_with_dcps_default_planners(tmp_path: Path) -> None:
    """Writer and reader serve DCP's own planners, in every combination with ours."""
    for value in run_ranks(with_default_planners, 2, str(tmp_path)).values:
        assert value == [[[], {"step": 5, "who": ("x",)}]] * 4


def two_dims(seed: int, parallel: bool) -> nn.Module:
    """TP × FSDP2: the strided shard order; uneven where FSDP cuts what TP has cut."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 10, bias=True), nn.ReLU(), nn.Linear(10, 6, bias=True))
    if parallel:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"])
    return model


def strided(root: str) -> list[bool]:
    model = two_dims(0, parallel=True)
    writer = ShardedStorageWriter(f"{root}/tp")
    dcp.save({"model": model.state_dict()}, storage_writer=writer, planner=ShardSavePlanner())
    plain = two_dims(1, parallel=False)
    state_dict = {"model": plain.state_dict()}
    reader = ShardedStorageReader(f"{root}/tp")
    dcp.load(state_dict, storage_reader=reader, planner=ReshardLoadPlanner())
    reference = two_dims(0, parallel=False).state_dict()
    found = [torch.equal(plain.state_dict()[name], value) for name, value in reference.items()]
    # And back: a plain save into the strided layout.
    dcp.save(
        {"model": reference},
        storage_writer=ShardedStorageWriter(f"{root}/plain"),
        planner=ShardSavePlanner(),
    )
    other = two_dims(2, parallel=True)
    state_dict = {"model": other.state_dict()}
    dcp.load(
        state_dict,
        storage_reader=ShardedStorageReader(f"{root}/plain"),
        planner=ReshardLoadPlanner(),
    )
    for name, tensor in other.state_dict().items():
        mine, theirs = tensor.to_local(), model.state_dict()[name].to_local()
        found.append(isinstance(tensor, DTensor) and torch.equal(mine, theirs))
    return found


def test_tensor_parallel_with_fsdp(tmp_path: Path) -> None:
    """The strided shard order of TP × FSDP2 is saved and loaded as what the ranks really hold."""
    for value in run_ranks(strided, 4, str(tmp_path)).values:
        assert value == [True] * 8
