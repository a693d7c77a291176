"""A small training job for tests with real ranks: all random, all kinds of tensors, recorded to the bit."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any, TypedDict

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset

from fsdp_ckpt import CheckpointManager, ResumableSampler, TrainState, make_loader
from tests.endings import die_together

NUM_SAMPLES = 48
GLOBAL_BATCH = 12  # divisible by 1, 2, 3 and 4 ranks


class Net(nn.Module):
    """Uneven dims, tensors smaller than the world, 0-d and int and bool state, dropout, batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(7, 3, bias=False)
        self.tiny = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("mask", torch.tensor([True, False, True]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        hidden = self.drop(torch.relu(self.norm(self.first(x))))
        return self.last(hidden) * self.tiny * self.mask


class Noisy(Dataset[tuple[int, torch.Tensor]]):
    """Samples with random augmentation from all three generators."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        noise = torch.rand(5) + random.random() + float(np.random.rand())
        return index, torch.arange(5.0) * index / NUM_SAMPLES + noise


class Job:
    """One life of the job on this rank; build it, restore it, run it."""

    def __init__(self, root: str, *, seed: int = 0, workers: int = 0, shard: bool = True) -> None:
        self.root = root
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        torch.manual_seed(seed)
        self.model = Net()
        if shard and dist.is_initialized():
            mesh = init_device_mesh("cpu", (self.world_size,))
            fully_shard(self.model.first, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
                {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
            ],
            lr=1e-2,
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / 4) * 0.97**step
        )
        self.sampler = ResumableSampler(NUM_SAMPLES, seed=3)
        self.loader = make_loader(
            Noisy(),
            self.sampler,
            batch_size=GLOBAL_BATCH // self.world_size,
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
        )
        self.generator = np.random.default_rng(100 + self.rank)
        self.state = TrainState(
            model=self.model,
            optimizer=self.optimizer,
            lr_scheduler=self.scheduler,
            data=self.sampler,
            generators={"augment": self.generator},
        )
        # Every rank has random streams of its own.
        torch.manual_seed(1000 * seed + self.rank)
        random.seed(2000 * seed + self.rank)
        np.random.seed(3000 * seed + self.rank)
        self.manager = CheckpointManager(root, self.state, timeout_s=250)

    def run(
        self, until: int, *, save_at: Iterable[int] = (), kill_at: int | None = None
    ) -> list[dict[str, Any]]:
        """Train until step ``until``; return what happened in every step, floats as hex."""
        records: list[dict[str, Any]] = []
        save_at = set(save_at)
        if self.state.progress.step in save_at:
            self.manager.save(mode="sync")
        while self.state.progress.step < until:
            for ids, batch in self.loader:
                output = self.model(batch)
                loss = (output + torch.rand(()) + self.generator.random()).square().mean()
                loss.backward()
                if kill_at == self.state.progress.step + 1:
                    die_together(f"{self.root}.dies")
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.scheduler.step()
                self.state.progress.advance(samples=GLOBAL_BATCH)
                records.append(
                    {
                        "step": self.state.progress.step,
                        "loss": loss.item().hex(),
                        "lr": [lr.hex() for lr in self.scheduler.get_last_lr()],
                        "ids": ids.tolist(),
                        "python": random.random().hex(),
                        "numpy": float(np.random.rand()).hex(),
                    }
                )
                if self.state.progress.step in save_at:
                    self.manager.save(mode="sync")
                if self.state.progress.step == until:
                    return records
            self.state.progress.next_epoch()
        return records

    def digests(self) -> dict[str, str]:
        """Return name → digest of every local tensor of model and optimizer, and of the random states."""
        found = {name: digest(t) for name, t in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in sorted(self.optimizer.state[parameter].items()):
                found[f"{name}.{key}"] = digest(value)
        found["rng.torch"] = digest(torch.get_rng_state())
        found["rng.python"] = str(xxhash.xxh3_64_hexdigest(repr(random.getstate()).encode()))
        found["rng.numpy"] = repr(np.random.get_state()[1].tobytes())[:200]  # type: ignore[index]
        found["rng.augment"] = repr(self.generator.bit_generator.state)
        return found

    def full_digests(self) -> dict[str, str]:
        """Return name → digest of every whole tensor of model and optimizer; the same on any layout."""
        found: dict[str, str] = {}
        for name, tensor in self.model.state_dict().items():
            found[name] = digest(full(tensor))
        for name, parameter in self.model.named_parameters():
            for key, value in sorted(self.optimizer.state[parameter].items()):
                found[f"{name}.{key}"] = digest(full(value))
        found["lr"] = repr(self.scheduler.state_dict())
        found["progress"] = repr(self.state.progress)
        found["data"] = repr(self.sampler.state_dict())
        return found


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def digest(tensor: torch.Tensor) -> str:
    """Return dtype, shape and a digest of a tensor's bytes; of this rank's part of a DTensor."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    data = local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {tuple(tensor.shape)} {xxhash.xxh3_64_hexdigest(data)}"


class Life(TypedDict, total=False):
    """How one life of the job differs from the default."""

    seed: int
    workers: int
    save_at: tuple[int, ...]
    kill_at: int | None
    step: int | None


def live(root: str, until: int, how: Life | None = None) -> dict[str, Any]:
    """One life: build, restore, train; return the record."""
    how = how or {}
    job = Job(root, seed=how.get("seed", 0), workers=how.get("workers", 0))
    report = job.manager.restore(how.get("step"))
    restored = job.full_digests() if report.step is not None else None
    records = job.run(until, save_at=how.get("save_at", ()), kill_at=how.get("kill_at"))
    result = {
        "restored_step": report.step,
        "restored": restored,
        "derived": report.derived,
        "records": records,
        "digests": job.digests(),
        "full": job.full_digests(),
    }
    job.manager.close()
    return result
