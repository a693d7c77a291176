"""A training state of a given size, and steps that keep the cores as busy as training does."""

from __future__ import annotations

import math
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fsdp_ckpt import TrainState

__all__ = ["Training"]

NUM_LAYERS = 24
BATCH, WIDTH = 256, 1024  # of a step: some 30 ms where two ranks share a core


class Training:
    """A stack of linear layers under FSDP2 with AdamW's moments in FP32, filled without a step.

    Args:
        state_bytes: Parameters and moments together, over all ranks, in bytes; met within a few per cent.
    """

    def __init__(self, state_bytes: int) -> None:
        per_layer = state_bytes // (3 * 4 * NUM_LAYERS)
        width = max(math.isqrt(per_layer) // 16, 1) * 16
        with torch.device("meta"):
            layers = [nn.Linear(width, width) for _ in range(NUM_LAYERS)]
            self.model = nn.Sequential(*layers, nn.LayerNorm(width))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.model.to_empty(device="cpu")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        # One noise for all: to draw random numbers for gigabytes takes longer than the measurements.
        noise = torch.randn(-(-width // dist.get_world_size()) * width)
        for parameter in self.model.parameters():
            moments = {name: torch.empty_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
            for tensor in (parameter, *moments.values()):
                local = local_of(tensor)
                local.copy_(noise[: local.numel()].view_as(local))
        self.state = TrainState(model=self.model, optimizer=self.optimizer)
        torch.manual_seed(dist.get_rank())
        self._block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self._batch = torch.randn(BATCH, WIDTH)
        self._reduced = torch.zeros(WIDTH * 256 + 1)

    def local_tensors(self) -> list[torch.Tensor]:
        """Return this rank's part of parameters and moments, each contiguous."""
        moments = [
            value
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, DTensor)
        ]
        return [local_of(tensor) for tensor in (*self.model.parameters(), *moments)]

    def state_dict(self) -> dict[str, object]:
        """Return the state as DCP takes it; the tensors are the live ones."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def run_step(self, *, is_done: bool) -> tuple[float, bool]:
        """Forward, backward and a small all-reduce; called by every rank.

        Args:
            is_done: Whether this rank has what it waits for.

        Returns:
            The seconds it took, and whether every rank is done.
        """
        start = time.perf_counter()
        self._block(self._batch).square().mean().backward()
        weight = self._block[0].weight
        assert weight.grad is not None
        self._reduced[:-1].copy_(weight.grad.view(-1)[: len(self._reduced) - 1])
        self._reduced[-1] = float(is_done)
        dist.all_reduce(self._reduced)
        self._block.zero_grad()
        all_done = int(self._reduced[-1].item()) == dist.get_world_size()
        return time.perf_counter() - start, all_done


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a DTensor that is here."""
    assert isinstance(tensor, DTensor)
    return tensor.to_local().detach()
