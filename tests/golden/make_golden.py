"""Write the golden checkpoint of the format's current version: `python tests/golden/make_golden.py [FOLDER]`.

Three ranks save every kind of content that the format knows. The bytes are the same in every run: nothing in
the state is random, and the attempt id and the time of the save, which otherwise tell saves apart, are fixed.
Golden data of a published version is never written again: a new version gets a folder of its own.
"""

from __future__ import annotations

import collections
import dataclasses
import http
import struct
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from fsdp_ckpt import RankLocal, ShardedStorageWriter, ShardSavePlanner
from fsdp_ckpt.dcp import writer
from fsdp_ckpt.manifest.schema import Manifest
from fsdp_ckpt.plan.layouts import FlatLayout, Mesh
from fsdp_ckpt.state.local_shards import LocalShards
from fsdp_ckpt.testing import run_ranks

WORLD_SIZE = 3
STEP = 42
GENERATION = 1
ATTEMPT = "20260101T000000-0123456789ab"
CREATED = "2026-01-01T00:00:00+00:00"
V1 = Path(__file__).resolve().parent / "v1"

DTYPES = (
    "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "bfloat16",
    "float32", "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2",
    "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
)  # fmt: skip


def main() -> None:
    """Write the checkpoint below FOLDER, by default where the tests look for it."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else V1
    run_ranks(save, WORLD_SIZE, str(folder / f"step-{STEP:09d}"), timeout_s=300)


def save(path: str) -> None:
    """Save the state of this rank."""
    draft_manifest = ShardSavePlanner.draft_manifest

    def draft_fixed(planner: ShardSavePlanner) -> Manifest:
        return dataclasses.replace(draft_manifest(planner), created=CREATED)

    with (
        patch.object(writer, "new_attempt", lambda: ATTEMPT),
        patch.object(ShardSavePlanner, "draft_manifest", draft_fixed),
    ):
        dcp.save(
            build_state(dist.get_rank()),
            storage_writer=ShardedStorageWriter(path, step=STEP, generation=GENERATION),
            planner=ShardSavePlanner(),
        )


def build_state(rank: int) -> dict[Any, Any]:
    """Return what ``rank`` saves."""
    model = Net()
    mesh = init_device_mesh("cpu", (1, WORLD_SIZE), mesh_dim_names=("data", "tensor"))
    all_ranks = init_device_mesh("cpu", (WORLD_SIZE,))
    parallelize_module(model.column, mesh["tensor"], ColwiseParallel())
    fully_shard(model.column, mesh=mesh["data"])
    fully_shard(model.tiny, mesh=all_ranks)
    fully_shard(model.rows, mesh=all_ranks)
    fill(model.rows.weight, counting((5, 4), torch.float32, 0))
    fill(model.rows.bias, counting((5,), torch.float32, 50))
    fill(model.column.weight, counting((7, 2), torch.float32, 100))
    fill(model.tiny.weight, counting((1, 1), torch.bfloat16, 7))
    weight = model.rows.weight
    moment = torch.empty_like(weight.detach(), dtype=torch.float64)
    fill(moment, counting((5, 4), torch.float64, 200))
    # Rank 2 holds the first two of four elements, rank 0 the others.
    turned = DTensor.from_local(
        torch.tensor(([302, 303], [], [300, 301])[rank], dtype=torch.int32),
        DeviceMesh("cpu", [2, 0, 1]),
        [Shard(0)],
        run_check=False,
        shape=torch.Size([4]),
        stride=(1,),
    )
    return {
        "model": model.state_dict(),
        "buffers": {
            "count": torch.tensor(7),
            "mask": torch.tensor([True, False, True]),
            "empty": torch.zeros(0, 3),
            # As statistics of unsharded layers: other numbers on every rank.
            "running": torch.arange(4.0) + 10 * rank,
        },
        "optimizer": {
            "state": {"rows.weight": {"exp_avg": moment, "step": torch.tensor(42.0)}},
            "param_groups": [{"params": ["rows.weight"], "betas": (0.9, 0.95), "lr": 1e-3}],
        },
        "placed": {
            "turned": turned,
            "columns": distribute_tensor(counting((2, 4), torch.int32, 400), all_ranks, [Shard(1)]),
        },
        "flat": flat_tensors(rank),
        "dtypes": {name: every_byte(getattr(torch, name)) for name in DTYPES},
        "containers": {
            "list": [torch.arange(2), {"inner": torch.arange(3)}],
            "tuple": (torch.arange(4), "between", (torch.arange(5),)),
            3: {"int key": torch.arange(6)},
        },
        "values": values(),
        "worker": {"id": 10 + rank, "same": "on all ranks"},
        "rng": RankLocal(
            {
                "state": torch.arange(5, dtype=torch.uint8) + rank,
                "python": (3, (rank, rank + 1), None),
                "numpy": np.arange(3, dtype=np.uint32) * rank,
                **({"device": "on one rank only"} if rank == 1 else {}),
            }
        ),
    }


class Net(nn.Module):
    """Dims that three ranks do not divide, a tensor smaller than the world, two meshes, two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(4, 5)
        self.column = nn.Linear(2, 7, bias=False)
        self.tiny = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)


def counting(shape: tuple[int, ...], dtype: torch.dtype, start: int) -> torch.Tensor:
    """Return start, start + 1, ... in row-major order."""
    size = int(np.prod(shape, dtype=int))
    return (torch.arange(size, dtype=torch.float64) + start).reshape(shape).to(dtype)


def fill(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a whole tensor into a sharded one."""
    assert isinstance(target, DTensor)
    with torch.no_grad():
        target.copy_(distribute_tensor(source, target.device_mesh, target.placements))


def flat_tensors(rank: int) -> dict[str, LocalShards]:
    """Two tensors, one after the other, in shards of nine elements."""
    found, start = {}, 0
    for name, shape in (("first", (4, 5)), ("second", (2, 3))):
        layout = FlatLayout(Mesh((1, WORLD_SIZE), tuple(range(WORLD_SIZE))), 9, start)
        whole = counting(shape, torch.float32, 500 + start).reshape(-1)
        low, high = layout.range_of(shape, rank)
        found[name] = LocalShards.of(shape, layout, rank, whole[low:high])
        start += whole.numel()
    return found


def every_byte(dtype: torch.dtype) -> torch.Tensor:
    """Return two elements whose bytes are 1, 2, 3, ...; for bool, 1 and 0."""
    data = torch.arange(1, 1 + 2 * dtype.itemsize, dtype=torch.uint8)
    return (data % 2 if dtype == torch.bool else data).view(dtype)


def values() -> dict[str, Any]:
    """Every type of typed JSON."""
    counter = collections.Counter({"a": 2, "b": 0})
    grouped: collections.defaultdict[str, list[int]] = collections.defaultdict(list, {"x": [1]})
    return {
        "none": None,
        "bool": True,
        "int": -3,
        "long int": 2**5000 + 1,
        "float": 0.1,
        "negative zero": -0.0,
        "infinity": float("inf"),
        "nan": struct.unpack(">d", bytes.fromhex("7ff8000000000123"))[0],
        "complex": complex(1.5, float("-inf")),
        "str": "ä\n\U0001f600",
        "bytes": b"\x00\xff",
        "bytearray": bytearray(b"ab"),
        "tuple": (1, (2.5, "x"), []),
        "list": [1, None, [True]],
        "set": {3, 1, 2},
        "frozenset": frozenset({(1, "a")}),
        "range": range(1, 9, 2),
        "deque": collections.deque([1, 2], maxlen=3),
        "dict": {"nested": {1: "one", (2, 3): "pair"}, "empty": {}},
        "dollar": ({"$": "not a tag"},),
        "OrderedDict": collections.OrderedDict(b=1, a=2),
        "Counter": counter,
        "defaultdict": grouped,
        "enum": http.HTTPStatus.NOT_FOUND,
        "scalar": np.float32(0.1),
        "datetime64": np.datetime64("2026-01-01", "s"),
        "ndarray": np.array([[1, 2], [3, 4]], dtype=">i2"),
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 0]),
        "device": torch.device("cuda", 1),
        "layout": torch.strided,
        "memory_format": torch.channels_last,
    }


if __name__ == "__main__":
    main()
