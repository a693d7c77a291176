"""What ``plan`` says that ranks will read is what they read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_ckpt import CheckpointManager, ResumableSampler, TrainState
from fsdp_ckpt.commit.checkpoint import Checkpoint
from fsdp_ckpt.commit.load_cost import load_costs
from fsdp_ckpt.compare.forecast import forecast
from fsdp_ckpt.plan.targets import TargetLayout
from fsdp_ckpt.storage.local import LocalStore
from fsdp_ckpt.storage.open import open_store
from fsdp_ckpt.testing import run_ranks


def make_state() -> TrainState:
    """A model of several blocks of digests, uneven on any number of ranks, with AdamW."""
    model = nn.Sequential(nn.Linear(300, 517), nn.LayerNorm(517), nn.Linear(517, 411, bias=False))
    model.register_buffer("seen", torch.arange(7))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return TrainState(model=model, optimizer=optimizer, data=ResumableSampler(48))


def save(root: str) -> None:
    with CheckpointManager(root, make_state(), timeout_s=60) as manager:
        manager.save(mode="sync")


def count_reads(root: str) -> dict[str, int]:
    """Restore; return how many requests for shard files this rank made, and for how many bytes."""
    state = make_state()
    reads: list[int] = []
    real = LocalStore.read_into

    def noted(self: LocalStore, key: str, byte_offset: int, buffer: memoryview) -> None:
        if key.endswith(".safetensors"):
            reads.append(len(buffer))
        real(self, key, byte_offset, buffer)

    LocalStore.read_into = noted  # type: ignore[method-assign]  # this process is the rank's alone
    with CheckpointManager(root, state, timeout_s=60) as manager:
        assert manager.restore().step == 0
    return {"requests": len(reads), "bytes": sum(reads)}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = str(tmp_path_factory.mktemp("run"))
    run_ranks(save, 4, root)
    return root


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_read_what_was_foretold(root: str, world_size: int) -> None:
    """Bytes and requests of every rank, when FSDP2 restores on fewer ranks than saved."""
    checkpoint = Checkpoint.open(open_store(Path(root) / "step-000000000"))
    found = forecast(checkpoint, TargetLayout(world_size=world_size))
    foretold: list[dict[str, Any]] = [
        {"requests": cost.num_requests, "bytes": cost.read_bytes + cost.header_bytes}
        for cost in found.ranks
    ]
    assert run_ranks(count_reads, world_size, root).values == foretold
    assert found.problems == ()
    assert found.data_cursor == "goes on at sample 0 of 48 in epoch 0"
    named = tuple(load_costs(checkpoint, TargetLayout(kind="fsdp", world_size=world_size)))
    assert named == found.ranks
