"""DeepSpeed engines for tests: one small model, trained for real on every rank.

What an engine holds is read with DeepSpeed's own gathering functions, never with ours.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from fsdp_ckpt import TrainState

NUM_FEATURES = 5
GROUPS = (
    {"lr": 1e-2, "weight_decay": 0.1},
    {"lr": 3e-3, "weight_decay": 0.0, "betas": (0.8, 0.95)},
)


class Net(nn.Module):
    """Odd dims, tied and frozen parameters, one of one element, buffers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(NUM_FEATURES, 7)
        self.second = nn.Linear(7, NUM_FEATURES)
        self.tied = nn.Linear(NUM_FEATURES, 7)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(7, 3).requires_grad_(False)
        self.tiny = nn.Parameter(torch.rand(1))
        self.register_buffer("seen", torch.tensor(10 + seed))
        self.register_buffer("shift", torch.rand(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        hidden = self.tied(self.second(torch.relu(self.first(x))))
        return (self.frozen(hidden) * self.tiny + self.shift).square().mean()


def optimizer_groups(net: nn.Module) -> list[dict[str, Any]]:
    """Return weights, and the rest, with options of their own; frozen ones too."""
    chosen: tuple[list[nn.Parameter], ...] = ([], [])
    for name, parameter in net.named_parameters():
        chosen[0 if name.endswith("weight") else 1].append(parameter)
    return [{"params": ps, **how} for ps, how in zip(chosen, GROUPS, strict=True)]


def optimizer_of(net: nn.Module) -> torch.optim.AdamW:
    """Return the optimizer that engines and plain models have."""
    return torch.optim.AdamW(optimizer_groups(net))


def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """Return a schedule that no two steps have the same value of."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


def batch(step: int, dtype: torch.dtype) -> torch.Tensor:
    """Return this rank's batch of a step, shape (2, NUM_FEATURES)."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(2, NUM_FEATURES, generator=generator).to(dtype)


def load_deepspeed() -> Any:
    """Return the package, without the seconds and the memory that ranks on one machine do not have."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    with mock.patch.object(torch, "compile", lambda fn, **_: fn):
        # Decorates at import, for which torch loads all of its compiler.
        import deepspeed.runtime.zero.muon.original_muon
    import deepspeed

    # Its shared-memory collectives are compiled for half a minute, and jobs beside each other on one machine
    # would meet in the same memory.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    gc.freeze()  # stage 3 collects garbage on every start: half a second with all that was imported
    return deepspeed


class EngineJob:
    """One engine and its training state.

    Args:
        stage: Of ZeRO.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        seed: Of the parameters.
        **config: Further configuration of DeepSpeed.
    """

    def __init__(
        self, stage: int, precision: str = "bf16", *, seed: int = 0, **config: Any
    ) -> None:
        deepspeed = load_deepspeed()
        self.stage = stage
        net = Net(seed)
        zero = {"stage": stage, **config.pop("zero_optimization", {})}
        options: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": zero,
            "gradient_clipping": 1.0,
            **({precision: {"enabled": True}} if precision != "fp32" else {}),
        }
        for name, value in config.items():
            options[name] = {**options.get(name, {}), **value} if isinstance(value, dict) else value
        optimizer = optimizer_of(net)
        # DeepSpeed wants a CPU with instructions for it; torch computes in it on any.
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
        self.engine = deepspeed.initialize(
            model=net,
            optimizer=optimizer,
            lr_scheduler=schedule_of(optimizer),
            config=options,
            dist_init_required=False,
        )[0]
        dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        self.dtype = dtypes[precision]
        self.state = TrainState(engine=self.engine)

    def train(self, num_steps: int) -> list[str]:
        """Train; return each step's loss on this rank, as hex."""
        losses = []
        for _ in range(num_steps):
            loss = self.engine(batch(self.state.progress.step, self.dtype))
            self.engine.backward(loss)
            self.engine.step()
            self.state.progress.advance(samples=2 * dist.get_world_size())
            losses.append(loss.item().hex())
        return losses

    def whole(self) -> dict[str, torch.Tensor]:
        """Return name → whole tensor, gathered by DeepSpeed itself."""
        return dict(self._whole())

    def _whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if hasattr(zero := self.engine.optimizer, "_hp_optimizer_states_linked"):
            # 0.19 gives access to moments once the first group has stepped, when other groups have none yet.
            zero._hp_optimizer_states_linked = False
            zero._lazy_init_hp_params_optimizer_state()
        for name, parameter in self.engine.module.named_parameters():
            with GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
                used = parameter.detach().clone()
            if not parameter.requires_grad:
                yield f"model.{name}", used.clone()
                continue
            yield f"used.{name}", used
            if self.stage == 0:  # DeepSpeed gathers nothing, since every rank has all
                yield f"model.{name}", used.clone()
            else:
                yield f"model.{name}", safe_get_full_fp32_param(parameter).clone()
            for key in ("exp_avg", "exp_avg_sq"):
                if self.stage == 0:
                    moment = self.engine.optimizer.state[parameter][key]
                else:
                    moment = safe_get_full_optimizer_state(parameter, key)
                yield f"optimizer.state.{name}.{key}", moment.clone()
        for name, buffer in self.engine.module.named_buffers():
            yield f"model.{name}", buffer.clone()

    def counted(self) -> dict[str, Any]:
        """Return what is no tensor: schedule, counters, loss scale, step counts, hyperparameters."""
        engine = self.engine
        inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
        return {
            "schedule": engine.lr_scheduler.state_dict()["last_epoch"],
            "lr": [group["lr"] for group in inner.param_groups],
            "betas": [tuple(group["betas"]) for group in inner.param_groups],
            "counters": [engine.global_steps, engine.global_samples, engine.micro_steps],
            "skipped": engine.skipped_steps,
            "loss_scale": float(getattr(engine.optimizer, "loss_scale", 1)),
            "steps": sorted({float(state["step"]) for state in inner.state.values()}),
        }


def plain_state(model: nn.Module) -> TrainState:
    """Return the training state of the same model without DeepSpeed, in whatever it is wrapped."""
    optimizer = optimizer_of(model)
    return TrainState(model=model, optimizer=optimizer, lr_scheduler=schedule_of(optimizer))


def unequal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names that are not the same tensor, to the bit."""
    return [
        f"{name}: {found.get(name)} is not {expected.get(name)}"
        for name in sorted(found.keys() | expected.keys())
        if name not in found
        or name not in expected
        or found[name].dtype != expected[name].dtype
        or not torch.equal(found[name], expected[name])
    ]
