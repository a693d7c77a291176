"""Plain DCP calls on our storage: ``dcp.save``, ``dcp.async_save`` and ``dcp.load``.

    torchrun --nproc-per-node 2 examples/plain_dcp.py RUN-FOLDER

For programs that look after their own state dict. Here each checkpoint has a folder of its own; which one is
the newest, and what to do about a damaged one, is the program's to decide. ``CheckpointManager`` does that.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_ckpt import (
    ReshardLoadPlanner,
    ShardedStorageReader,
    ShardedStorageWriter,
    ShardSavePlanner,
    process_group,
)

NUM_STEPS = 12


def committed(root: Path) -> list[Path]:
    """Return the folders of whole checkpoints, oldest first: those with a manifest."""
    return sorted(found.parent for found in root.glob("step-*/manifest.json"))


def train(root: Path) -> None:
    """Train from the newest checkpoint under ``root``, or from the start."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    done = 0

    if found := committed(root):
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": None}
        reader = ShardedStorageReader(str(found[-1]))
        dcp.load(state, storage_reader=reader, planner=ReshardLoadPlanner())
        set_state_dict(
            model, optimizer, model_state_dict=weights, optim_state_dict=state["optimizer"]
        )
        done = state["step"]
    dist.barrier()  # no rank saves while another still looks for what there is
    if dist.get_rank() == 0:
        print(f"begins at step {done}", flush=True)

    # A group of its own: what it exchanges in the background must not come between training's collectives.
    background = dist.new_group()
    inputs = torch.linspace(-1, 1, 8 * 8).reshape(8, 8)
    pending = None
    for step in range(done + 1, NUM_STEPS + 1):
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.9f}", flush=True)
        if step % 4 == 0:
            if pending is not None:
                pending.result()  # raises what the save before this one raised
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": moments, "step": step}
            writer = ShardedStorageWriter(str(root / f"step-{step:09d}"))
            if step < NUM_STEPS:
                pending = dcp.async_save(
                    state,
                    storage_writer=writer,
                    planner=ShardSavePlanner(),
                    process_group=background,
                )
            else:
                dcp.save(state, storage_writer=writer, planner=ShardSavePlanner())


if __name__ == "__main__":
    with process_group("cpu:gloo"):
        train(Path(sys.argv[1]))
