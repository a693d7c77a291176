"""One small model in every layout, trained by hand, so that all layouts compute the same bits.

    gradients(step) --cut by layout--> every live parameter --> optimizer.step()

Invariant: a step uses no collective that could round, so after it every live element equals the
unsharded :func:`reference`'s.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from fsdp_ckpt import TrainState
from fsdp_ckpt.dcp.leaves import LIVE_TENSOR, leaves_of
from fsdp_ckpt.dcp.live import describe_tensor
from fsdp_ckpt.manifest.tree import path_name
from fsdp_ckpt.plan.box import Box
from fsdp_ckpt.state.local_shards import LocalShards
from fsdp_ckpt.state.names import canonical_name
from fsdp_ckpt.state.parameters import ParameterView, parameter_views
from tests.bits import bits

GROUPS = (
    {"lr": 1e-2, "weight_decay": 0.1},
    {"lr": 3e-3, "weight_decay": 0.0, "betas": (0.8, 0.95)},
)
# Optimizer group 0 by the first part of a parameter's name; the rest is group 1.
GROUP_0 = ("first", "low", "frozen")
STAGES = (("first", "second", "frozen", "seen"), ("low", "last", "tiny", "mask"))


class Net(nn.Module):
    """Odd dims, a bf16 part, a frozen part, int and bool buffers, a parameter of one element."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 5)
        self.low = nn.Linear(5, 6, dtype=torch.bfloat16)
        self.frozen = nn.Linear(5, 3)
        self.last = nn.Linear(5, 3, bias=False)
        self.tiny = nn.Parameter(torch.rand(1))
        self.register_buffer("seen", torch.tensor(10 + seed))
        self.register_buffer("mask", torch.rand(5) > 0.5)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.second(torch.relu(self.first(x)))
        low = self.low(hidden.to(torch.bfloat16)).float()
        return (self.last(hidden) * self.tiny + self.frozen(hidden)).sum() + low.sum()


class Zero(ZeroRedundancyOptimizer):
    """AdamW in partitions."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, optimizer_class=torch.optim.AdamW)

    def _verify_same_dense_param_type(self) -> None:
        """Allow bf16 beside fp32: only parameters as views of buckets need one type."""


@dataclass(frozen=True, slots=True)
class Live:
    """A model in a layout, and its optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    state: TrainState

    @classmethod
    def of(cls, model: nn.Module, optimizer_class: type[Any] = torch.optim.AdamW) -> Live:
        """Give ``model`` an optimizer that has not stepped."""
        views = parameter_views(model)
        groups: tuple[list[nn.Parameter], ...] = ([], [])
        for parameter in model.parameters():
            name = views[id(parameter)][0].name
            groups[0 if name.startswith(GROUP_0) else 1].append(parameter)
        options = [{"params": params, **how} for params, how in zip(groups, GROUPS, strict=True)]
        optimizer = optimizer_class(options)
        return cls(model, optimizer, TrainState(model=model, optimizer=optimizer))

    def state_names(self) -> set[str]:
        """Return the names of the optimizer state that this rank has after a step."""
        views = parameter_views(self.model)
        local = getattr(self.optimizer, "optim", self.optimizer)  # ZeRO's own partition
        return {
            f"optimizer.state.{view.name}.{key}"
            for group in local.param_groups
            for parameter in group["params"]
            if has_gradient(parameter, views[id(parameter)])
            for view in views[id(parameter)]
            for key in ("step", "exp_avg", "exp_avg_sq")
        }

    def step(self) -> None:
        """Train one step by hand."""
        put_gradients(self.model, gradients(self.state.progress.step))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.state.progress.advance()


@functools.cache
def reference(num_steps: int, seed: int = 0) -> dict[str, Any]:
    """Return name → tensor or value of the state after ``num_steps``, in one unsharded model."""
    live = Live.of(Net(seed))
    for _ in range(num_steps):
        live.step()
    return {
        name: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
        for name, leaf in named_leaves(live.state)
    }


@functools.cache
def gradients(step: int) -> dict[str, torch.Tensor]:
    """Return the whole gradients of the step after ``step``, the same on all ranks."""
    generator = torch.Generator().manual_seed(1000 + step)
    return {
        name: torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        for name, parameter in Net(0).named_parameters()
        if parameter.requires_grad
    }


def put_gradients(model: nn.Module, whole: Mapping[str, torch.Tensor]) -> None:
    """Set every live parameter's gradient to its part of ``whole``."""
    views = parameter_views(model)
    for parameter in model.parameters():
        parts = views[id(parameter)]
        if not has_gradient(parameter, parts):
            parameter.grad = None
        elif isinstance(parameter, DTensor):
            # From this rank's own copy: torch scatters no uneven strided shards.
            gradient, mesh = whole[parts[0].name], parameter.device_mesh
            parameter.grad = distribute_tensor(
                gradient, mesh, parameter.placements, src_data_rank=None
            )
        elif parts[0].layout is None:
            parameter.grad = whole[parts[0].name].clone()
        else:
            parameter.grad = torch.zeros_like(parameter)
            for view in parts:
                shards = view.of(parameter.grad)
                assert isinstance(shards, LocalShards)
                for box, part in shards.parts():
                    part.copy_(cut(whole[view.name], box))


def has_gradient(parameter: nn.Parameter, parts: Sequence[ParameterView]) -> bool:
    """Whether training gives a live parameter a gradient: FSDP1 does not, where a rank has no elements."""
    return parameter.requires_grad and (parts[0].layout is None or parameter.numel() > 0)


def cut(whole: torch.Tensor, box: Box) -> torch.Tensor:
    """Return a box of a whole tensor."""
    return whole[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))]


def named_leaves(state: TrainState) -> Iterator[tuple[str, Any]]:
    """Yield (name, leaf) of model, optimizer and progress; hyperparameters by parameter name."""
    collected = state.collect()
    del collected["rng"]
    for group in collected.get("optimizer", {}).pop("param_groups", {}).values():
        for name in group.pop("params"):
            yield f"group of {name}", dict(group)
    for path, leaf, _ in leaves_of(collected):
        yield path_name(path), leaf


def live_parts(state: TrainState) -> Iterator[tuple[str, Box, torch.Tensor]]:
    """Yield (name, box, elements) of every tensor that this rank holds; shares memory."""
    meshes: dict[Any, Any] = {}
    for name, leaf in named_leaves(state):
        if isinstance(leaf, LIVE_TENSOR):
            for box, part in describe_tensor(leaf, name, own_rank(), meshes).parts:
                yield name, box, part


def differences(live: Live, expected: Mapping[str, Any]) -> list[str]:
    """Return what of a trained state is not, to the bit, its part of ``expected``."""
    leaves = dict(named_leaves(live.state))
    held = {name for name in leaves if name.startswith("optimizer.state.")}
    found = [f"{name}: only there or only expected" for name in held ^ live.state_names()]
    meshes: dict[Any, Any] = {}
    for name, leaf in leaves.items():
        whole = expected.get(name)
        if not isinstance(leaf, LIVE_TENSOR):
            if repr(leaf) != repr(whole):
                found.append(f"{name} is {leaf}, not {whole}")
        elif whole is None or leaf.shape != whole.shape:
            found.append(f"{name} has shape {leaf.shape}")
        else:
            parts = describe_tensor(leaf, name, own_rank(), meshes).parts
            found += [
                f"{name} at {box.offsets} is {part}, not {cut(whole, box)}"
                for box, part in parts
                if bits(part) != bits(cut(whole, box))
            ]
    return found


def own_rank() -> int:
    """Return this process's rank, 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def spoil(live: Live) -> None:
    """Overwrite all that a restore must bring back, differently on every rank."""
    for _, _, part in live_parts(live.state):
        part.fill_(part.dtype != torch.bool and 77 + own_rank())
    for group in live.optimizer.param_groups:
        group["lr"] = 7.0
    live.state.progress.step = 77


class Layouts:
    """Builds the model in any layout; called by every rank alike.

    Holds the meshes, so that every model uses the same process groups.
    """

    def __init__(self) -> None:
        self.world_size = dist.get_world_size()
        self.line = init_device_mesh("cpu", (self.world_size,))
        shape = (self.world_size // 2, 2)
        self.grid = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))
        self.wraps: dict[str, Callable[[Net], nn.Module]] = {
            "plain": lambda net: net,
            "ddp": DistributedDataParallel,
            "zero": DistributedDataParallel,
            "fsdp2": lambda net: self.fsdp2(net, self.line),
            "hsdp": lambda net: self.fsdp2(net, self.grid),
            "tp": lambda net: tensor_parallel(net, self.line),
            "tp-fsdp2": lambda net: self.fsdp2(
                tensor_parallel(net, self.grid["inner"]), self.grid["outer"]
            ),
            "pipeline": self.pipeline,
        }
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"):
            for orig in (True, False):
                name = f"fsdp1-{strategy}-{'orig' if orig else 'flat'}"
                self.wraps[name] = self.fsdp1(ShardingStrategy[strategy], use_orig_params=orig)

    def names(self) -> list[str]:
        """Return the names of all layouts."""
        return list(self.wraps)

    def build(self, name: str, seed: int) -> nn.Module:
        """Return the model in the layout ``name``."""
        return self.wraps[name](Net(seed))

    def attach(self, name: str, model: nn.Module) -> Live:
        """Give a model a new optimizer."""
        return Live.of(model, Zero if name == "zero" else torch.optim.AdamW)

    def fsdp2(self, net: Net, mesh: Any) -> nn.Module:
        """Shard two parts and the rest."""
        for part in (net.first, net.low):
            fully_shard(part, mesh=mesh)
        return fully_shard(net, mesh=mesh)

    def fsdp1(
        self, strategy: ShardingStrategy, *, use_orig_params: bool
    ) -> Callable[[Net], nn.Module]:
        """Flatten; with flat parameters only, a unit must be of one group, and frozen or not."""
        hybrid = strategy is ShardingStrategy.HYBRID_SHARD
        parts = ("low",) if use_orig_params else ("first", "low", "frozen")

        def wrap(module: nn.Module) -> nn.Module:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore"
                )  # FSDP1 is deprecated, which is no reason to lose its runs
                return FullyShardedDataParallel(
                    module,
                    sharding_strategy=strategy,
                    use_orig_params=use_orig_params,
                    device_mesh=self.grid if hybrid else self.line,
                    device_id=torch.device("cpu"),
                )

        def wrap_all(net: Net) -> nn.Module:
            for part in parts:
                setattr(net, part, wrap(getattr(net, part)))
            return wrap(net)

        return wrap_all

    def pipeline(self, net: Net) -> nn.Module:
        """Keep one stage's part: the first half of the ranks and the second half hold different ones."""
        other = STAGES[0 if dist.get_rank() >= self.world_size // 2 else 1]
        for name in other:
            delattr(net, name)
        return net


def tensor_parallel(net: Net, mesh: Any) -> Net:
    """Cut the first two layers; the others stay whole on every rank of ``mesh``."""
    # Local outputs would have to be even.
    plan = {"first": ColwiseParallel(use_local_output=False), "second": RowwiseParallel()}
    parallelize_module(net, mesh, plan)
    return net


def whole_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return this rank's view of the whole parameters, put together by torch, not by us; uses collectives."""
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return {
            canonical_name(model, name): (
                p.full_tensor() if isinstance(p, DTensor) else p.detach().clone()
            )
            for name, p in model.named_parameters()
        }
