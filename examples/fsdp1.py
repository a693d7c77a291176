"""FSDP1: ``FullyShardedDataParallel``, flat parameters over all ranks.

    torchrun --nproc-per-node 2 examples/fsdp1.py RUN-FOLDER

Started again with the same folder, on any number of ranks, it goes on after its newest checkpoint.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import TensorDataset

from fsdp_ckpt import (
    CheckpointManager,
    ResumableSampler,
    SavePolicy,
    TrainState,
    make_loader,
    process_group,
)

NUM_STEPS, GLOBAL_BATCH = 12, 8


def make_model() -> nn.Module:
    """Build the model, the same on every rank, and shard it by its linear layers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


def train(root: str) -> int:
    """Train from the newest checkpoint under ``root``, or from the start; return the exit code."""
    num_ranks = dist.get_world_size()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # after sharding
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=NUM_STEPS)
    features = torch.linspace(-1, 1, 40 * 8).reshape(40, 8)
    dataset = TensorDataset(features, features.sum(1, keepdim=True))
    sampler = ResumableSampler(len(dataset), seed=0)  # this rank's part of the data
    loader = make_loader(dataset, sampler, batch_size=GLOBAL_BATCH // num_ranks)
    torch.manual_seed(1 + dist.get_rank())  # dropout differs from rank to rank

    state = TrainState(model=model, optimizer=optimizer, lr_scheduler=scheduler, data=sampler)
    policy = SavePolicy(every_steps=4, last_step=NUM_STEPS)
    with CheckpointManager(root, state, save=policy) as manager:
        report = manager.restore()
        if dist.get_rank() == 0:
            print(f"begins at step {report.step or 0}", flush=True)
        while not manager.should_stop:
            for inputs, targets in loader:
                loss = nn.functional.mse_loss(model(inputs), targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                state.progress.advance(samples=GLOBAL_BATCH)  # of all ranks
                if dist.get_rank() == 0:
                    print(f"step {state.progress.step} loss {loss.item():.9f}", flush=True)
                if manager.after_step().must_break:
                    break
            else:
                state.progress.next_epoch()
    return manager.exit_code


if __name__ == "__main__":
    with process_group("gloo"):
        exit_code = train(sys.argv[1])
    sys.exit(exit_code)
