"""Checkpoints of DeepSpeed for tests, and what DeepSpeed itself reads from them.

`python -m tests.deepspeed_files FOLDER` trains and saves with DeepSpeed; `tests/deepspeed_v0/` was made so.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from fsdp_ckpt.testing import run_ranks

__all__ = ["CLIENT_STATE", "EXPECTED", "KEPT", "RUNS", "Net", "save_runs", "write_large"]

KEPT = Path(__file__).parent / "deepspeed_v0"
EXPECTED = "expected.safetensors"
WORLD_SIZE = 2
STEPS = 2
# Folder → stage and precision.
RUNS = {"stage1": (1, "bf16"), "stage2": (2, "bf16"), "stage3": (3, "bf16")}
CLIENT_STATE = {"epoch": 3, "note": "as given", "ema": torch.arange(3.0)}


class Net(nn.Module):
    """Tied and frozen parameters, one of one element, buffers, two groups for the optimizer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(11, 6)
        self.linear = nn.Linear(6, 7)
        self.frozen = nn.Linear(7, 6).requires_grad_(False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.tensor(5 + seed))
        self.register_buffer("shift", torch.rand(6))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.linear(self.embedding(tokens)))
        return self.head(hidden * self.scale + self.shift.to(hidden.dtype)).float().square().mean()

    def groups(self) -> list[dict[str, Any]]:
        """Return matrices, and the rest, with other hyperparameters."""
        trained = [p for p in self.parameters() if p.requires_grad]
        return [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
        ]


def save_runs(folder: str, runs: dict[str, tuple[int, str]]) -> None:
    """Train and save each run with DeepSpeed, and write what it says is in there; on every rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed  # it reads the environment when it is imported

    # Its shared-memory collectives are compiled for half a minute, and jobs beside each other on one machine
    # would meet in the same memory.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

    for name, (stage, precision) in runs.items():
        net = Net()
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
            "zero_optimization": {"stage": stage},
        }
        if precision != "fp32":
            config[precision] = {"enabled": True}
        engine, *_ = deepspeed.initialize(
            model=net,
            model_parameters=net.groups(),
            config=config,
            dist_init_required=False,
        )
        for step in range(STEPS):
            torch.manual_seed(10 * step + rank)
            engine.backward(engine(torch.randint(0, 11, (4,))))
            engine.step()
        out = Path(folder, name)
        engine.save_checkpoint(str(out), client_state=CLIENT_STATE)
        _write_expected(engine, out)


def _write_expected(engine: Any, out: Path) -> None:
    """Write DeepSpeed's own consolidation, and every moment as it gathers it."""
    from deepspeed.utils import safe_get_full_optimizer_state
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    if hasattr(zero := engine.optimizer, "_hp_optimizer_states_linked"):
        # 0.19 gives access to moments once the first group has stepped, when other groups have none yet.
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()
    found = {
        f"{key}/{name}": safe_get_full_optimizer_state(parameter, key)
        for name, parameter in engine.module.named_parameters()
        if parameter.requires_grad
        for key in ("exp_avg", "exp_avg_sq")
    }
    dist.barrier()
    if dist.get_rank() == 0:
        weights = get_fp32_state_dict_from_zero_checkpoint(str(out))
        found |= {f"model/{name}": tensor for name, tensor in weights.items()}
        save_file({k: t.detach().clone().contiguous() for k, t in found.items()}, out / EXPECTED)
        for script in out.glob("*.py"):  # copied there by DeepSpeed
            script.unlink()
    dist.barrier()


def write_large(folder: Path, num_bytes: int) -> None:
    """Write what stage 3 leaves of a model of ``num_bytes`` on two ranks before its first step."""
    (tag := folder / "global_step0").mkdir(parents=True)
    (folder / "latest").write_text(tag.name)
    shapes = {f"layer{i}.weight": torch.Size([8, num_bytes // 4 // 64]) for i in range(8)}
    num_elements = sum(shape.numel() for shape in shapes.values()) // WORLD_SIZE
    model = {
        "module": {},
        "buffer_names": [],
        "param_shapes": [shapes],
        "frozen_param_shapes": {},
        "frozen_param_fragments": {},
        "shared_params": {},
        "global_steps": 0,
    }
    for rank in range(WORLD_SIZE):
        optimizer = {
            "zero_stage": 3,
            "partition_count": WORLD_SIZE,
            "fp32_flat_groups": [torch.full((num_elements,), float(rank))],
            "optimizer_state_dict": {"state": {}, "param_groups": [{"params": [0], "lr": 0.1}]},
        }
        prefix = f"zero_pp_rank_{rank}_mp_rank_00"
        torch.save(model, tag / f"{prefix}_model_states.pt")
        torch.save({"optimizer_state_dict": optimizer}, tag / f"{prefix}_optim_states.pt")


if __name__ == "__main__":
    results = run_ranks(save_runs, WORLD_SIZE, sys.argv[1], RUNS, timeout_s=300)
    sys.exit(len(results.failed))
