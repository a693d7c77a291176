"""Wrappers leave no trace in the names: saved with any of them, loaded with any other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DataParallel, DistributedDataParallel

from fsdp_ckpt import CheckpointManager, TrainState, process_group
from fsdp_ckpt.state.names import canonical_name
from tests.bits import bits


class Counter(nn.Module):
    """Has a state of its own making."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def get_extra_state(self) -> dict[str, Any]:
        return {"count": self.count, "seen": torch.tensor([self.count])}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.count = state["count"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.counter = Counter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.counter(self.norm(self.linear(x)))


class Net(nn.Module):
    """Submodules of the user's own that are called as the wrappers call theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.module = Block()
        self.model = nn.ModuleDict({"module": Block()})
        self.head = nn.Linear(3, 3, bias=False)
        self.head.weight = self.module.linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.model["module"](self.module(x)))


Wrap = Callable[[Net], nn.Module]


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def inside(wrap: Callable[[nn.Module], nn.Module]) -> Wrap:
    """Wrap two of the submodules."""

    def wrap_inside(net: Net) -> nn.Module:
        net.module = wrap(net.module)
        net.model["module"] = wrap(net.model["module"])
        return net

    return wrap_inside


WRAPS: dict[str, Wrap] = {
    "plain": lambda net: net,
    "compiled": compiled,
    "compiled inside": inside(compiled),
    "checkpointed": checkpoint_wrapper,
    "checkpointed inside": inside(checkpoint_wrapper),
    "data parallel": DataParallel,
    "ddp": DistributedDataParallel,
    "ddp inside": inside(DistributedDataParallel),
    "compiled ddp": lambda net: compiled(DistributedDataParallel(net)),
    "ddp of compiled": lambda net: DistributedDataParallel(compiled(net)),
    "all inside": inside(lambda m: compiled(checkpoint_wrapper(m))),
    "all": lambda net: DistributedDataParallel(
        compiled(checkpoint_wrapper(inside(lambda m: checkpoint_wrapper(compiled(m)))(net)))
    ),
}
BLOCK = {
    *("linear.weight", "linear.bias", "norm.weight", "norm.bias"),
    *("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"),
    "counter._extra_state.seen",
}
NAMES = {f"{block}.{name}" for block in ("module", "model.module") for name in BLOCK}


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group, which DDP needs."""
    store = tmp_path_factory.mktemp("group") / "store"
    with process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1):
        yield


class Life:
    def __init__(self, root: Path, wrap: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.net = Net()  # kept to look at without any wrapper
        self.blocks = [self.net.module, self.net.model["module"]]
        self.model = WRAPS[wrap](self.net)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        state = TrainState(model=self.model, optimizer=self.optimizer)
        self.manager = CheckpointManager(root, state)

    def train(self) -> None:
        """Make every tensor and count differ from a fresh one's; no forward, which would compile."""
        for i, parameter in enumerate(self.model.parameters()):
            parameter.grad = torch.full_like(parameter, i + 1.0)
        self.optimizer.step()
        for i, block in enumerate(self.blocks):
            block.counter.count = 5 + i
            block.norm.running_mean.fill_(7.0 + i)
            block.norm.num_batches_tracked.fill_(9 + i)

    def bits(self) -> Any:
        """Weights, buffers, extra state and moments in the order of the unwrapped model."""
        blocks = [bits(block.state_dict()) for block in self.blocks]
        parameters = [p for block in self.blocks for p in block.parameters()]
        return blocks, [bits(self.optimizer.state.get(p)) for p in parameters]


def stored_names(root: Path) -> set[str]:
    (shard,) = root.rglob("*.safetensors")
    with safe_open(shard, "pt") as file:
        return set(file.keys())


@pytest.mark.parametrize("wrap", WRAPS)
def test_names_are_those_of_the_plain_model(tmp_path: Path, wrap: str) -> None:
    """Weights, buffers, extra state and moments are stored under the names the user wrote."""
    life = Life(tmp_path, wrap, seed=0)
    life.train()
    life.manager.save(mode="sync")
    parameters = {n for n in NAMES if n.endswith(("weight", "bias"))}
    moments = {f"{n}.{key}" for n in parameters for key in ("step", "exp_avg", "exp_avg_sq")}
    expected = {f"model.{n}" for n in NAMES} | {f"optimizer.state.{n}" for n in moments}
    assert {n for n in stored_names(tmp_path) if not n.startswith("rng.")} == expected


@pytest.mark.parametrize("wrap", [w for w in WRAPS if w != "plain"])
@pytest.mark.parametrize("way", ["wrapped to plain", "plain to wrapped"])
def test_a_checkpoint_loads_across_wrappers(tmp_path: Path, wrap: str, way: str) -> None:
    """Saved with a wrapper and loaded without, and the reverse: every bit arrives."""
    first, second = (wrap, "plain") if way == "wrapped to plain" else ("plain", wrap)
    saved, fresh = Life(tmp_path, first, seed=0), Life(tmp_path, second, seed=1)
    saved.train()
    saved.manager.save(mode="sync")
    assert fresh.bits() != saved.bits()
    report = fresh.manager.restore()
    assert fresh.bits() == saved.bits()
    assert (report.missing, report.unexpected, report.derived) == ((), (), ())


@pytest.mark.parametrize("wrap", ["compiled", "ddp", "all inside", "all"])
def test_a_wrapped_model_trains_on_after_a_restore(tmp_path: Path, wrap: str) -> None:
    """Forward, backward and step see the restored tensors: the next weights equal the plain model's."""
    saved = Life(tmp_path, "plain", seed=0)
    saved.train()
    saved.manager.save(mode="sync")
    ended = []
    for name in ("plain", wrap):
        life = Life(tmp_path, name, seed=1)
        life.manager.restore()
        life.optimizer.zero_grad()
        life.model.eval()  # recomputing batch statistics in a compiled block is beyond torch
        life.model(torch.arange(12.0).reshape(4, 3)).square().sum().backward()
        life.optimizer.step()
        ended.append(life.bits())
    assert ended[0] == ended[1]


def test_a_key_whose_wrapper_hides_its_own_level_keeps_its_name() -> None:
    """Wrappers that already leave themselves out of ``state_dict`` lose no further level."""
    model = nn.Sequential(checkpoint_wrapper(nn.ModuleDict({"module": nn.Linear(1, 1)})))
    assert canonical_name(model, "0.module.weight") == "0.module.weight"
    assert canonical_name(model, "0._checkpoint_wrapped_module.module.weight") == "0.module.weight"
