"""Any optimizer, any groups, any schedule: they go on from a checkpoint as if nothing had happened."""

from __future__ import annotations

import collections
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fsdp_ckpt import CheckpointManager, MismatchError, TrainState, UnencodableStateError
from fsdp_ckpt.state.optimizer import LiveOptimizer
from fsdp_ckpt.state.parameters import parameter_views
from tests.bits import bits, live_bits, random_bits


class Life:
    """A small job with any optimizer; ``build`` makes its parts anew."""

    def __init__(self, root: Path, build: Callable[[], dict[str, Any]], seed: int) -> None:
        torch.manual_seed(seed)
        parts = build()
        self.model: nn.Module = parts.pop("model")
        self.optimizer: torch.optim.Optimizer = parts.pop("optimizer")
        self.scheduler = parts.pop("scheduler", None)
        self.extra = parts
        self.state = TrainState(
            model=self.model, optimizer=self.optimizer, lr_scheduler=self.scheduler, extra=parts
        )
        self.manager = CheckpointManager(root, self.state)

    def run(self, until: int) -> list[Any]:
        records = []
        while self.state.progress.step < until:
            x = torch.rand(4, 3)

            def closure(x: torch.Tensor = x) -> torch.Tensor:
                self.optimizer.zero_grad()
                loss = self.model(x).float().square().mean()
                loss.backward()
                return loss

            loss = self.optimizer.step(closure)
            if self.scheduler is not None:
                plateau = isinstance(self.scheduler, schedulers.ReduceLROnPlateau)
                self.scheduler.step(*([loss.item()] if plateau else []))
            if "ema" in self.extra:
                self.extra["ema"].update_parameters(self.model)
            self.state.progress.advance()
            records.append(bits([loss, [group["lr"] for group in self.optimizer.param_groups]]))
        return records

    def bits(self) -> dict[str, Any]:
        parts = {"scheduler": self.scheduler} if self.scheduler is not None else {}
        return live_bits(self.model, self.optimizer, **parts, **self.extra)


def check_continues(root: Path, build: Callable[[], dict[str, Any]], at: int = 2) -> Life:
    """A fresh life and one that went on and comes back both repeat what followed the save."""
    first = Life(root, build, seed=0)
    first.run(at)
    first.manager.save(mode="sync")
    saved = first.bits()
    records, ended = first.run(at + 3), first.bits()
    for life in (first, Life(root, build, seed=1)):
        assert life.manager.restore().step == at
        assert life.bits() == saved
        assert life.run(at + 3) == records
        assert life.bits() == ended
    return first


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


class MasterAdam(torch.optim.Optimizer):
    """Adam with fp32 moments and a separate fp32 master of each bf16 parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state.update(count=0, master=parameter.float(), mean=torch.zeros(parameter.shape))
            state["count"] += 1
            state["mean"].lerp_(parameter.grad.float(), 0.1)
            state["master"].sub_(state["mean"], alpha=self.param_groups[0]["lr"])
            parameter.copy_(state["master"])
        return loss


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.02), foreach=False),
    "fused tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.02), fused=True),
    "tensor betas": lambda p: torch.optim.Adam(
        p, betas=(torch.tensor(0.8), torch.tensor(0.9)), foreach=False
    ),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "rprop": lambda p: torch.optim.Rprop(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_continues(tmp_path: Path, name: str) -> None:
    """State tensors, counts, lists and numbers of every kind of optimizer come back as they were."""

    def build() -> dict[str, Any]:
        model = small_model()
        return {"model": model, "optimizer": OPTIMIZERS[name](model.parameters())}

    first = check_continues(tmp_path, build)
    assert (name == "sgd") == (not any(first.optimizer.state.values()))


def test_low_precision_with_masters_continues(tmp_path: Path) -> None:
    """bf16 parameters keep fp32 moments and a separate fp32 master, neither of which is cast."""

    def build() -> dict[str, Any]:
        model = small_model().bfloat16()
        inside = nn.Sequential(collections.OrderedDict(net=model, last=nn.Identity()))
        inside.register_forward_pre_hook(lambda _, args: (args[0].bfloat16(),))
        return {"model": inside, "optimizer": MasterAdam(inside.parameters())}

    first = check_continues(tmp_path, build)
    assert {p.dtype for p in first.model.parameters()} == {torch.bfloat16}
    kept = [s[key].dtype for s in first.optimizer.state.values() for key in ("master", "mean")]
    assert kept == [torch.float32] * 8


def test_adam_moments_keep_another_dtype(tmp_path: Path) -> None:
    """Moments of another dtype than their parameter's are not cast, neither saving nor loading."""
    states = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = small_model().bfloat16()
        optimizer = torch.optim.AdamW(model.parameters())
        state = TrainState(model=model, optimizer=optimizer)
        manager = CheckpointManager(tmp_path, state)
        if seed == 0:
            for parameter in model.parameters():
                optimizer.state[parameter] = {
                    "step": torch.tensor(7.0),
                    "exp_avg": torch.randn(parameter.shape),
                    "exp_avg_sq": torch.rand(parameter.shape, dtype=torch.float64),
                }
            manager.save(mode="sync")
        else:
            manager.restore()
        states.append(live_bits(model, optimizer))
    assert states[0] == states[1]


@pytest.mark.parametrize("capturable", [False, True])
def test_a_step_count_stays_on_the_host(capturable: bool) -> None:
    """As torch.optim keeps it, also of a 0-d parameter, whose shape it shares; captured, it moves along."""
    model = nn.Module()
    model.register_parameter("scale", nn.Parameter(torch.empty((), device="meta")))
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.param_groups[0]["capturable"] = capturable
    live = LiveOptimizer(optimizer, parameter_views(model))
    devices = {}
    for key in ("step", "exp_avg"):
        options = {"shape": (), "dtype": torch.float32, "placements": None, "fresh": {}}
        devices[key] = live.target(live.slots["scale"], key, **options).device.type
    assert devices == {"step": "meta" if capturable else "cpu", "exp_avg": "meta"}


class Parts(nn.Module):
    """A frozen parameter, one that is never used, and two that train."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(3, 2)
        self.down = nn.Linear(3, 1, bias=False)
        self.up = nn.Linear(1, 2, bias=False)
        self.unused = nn.Parameter(torch.rand(3))
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("only_adapter", [False, True])
def test_frozen_and_unused_parameters_continue(tmp_path: Path, only_adapter: bool) -> None:
    """What has no optimizer state gets none; an optimizer may hold the adapter's parameters alone."""

    def build() -> dict[str, Any]:
        model = Parts()
        adapter = [model.down.weight, model.up.weight]
        chosen = adapter if only_adapter else model.parameters()
        return {"model": model, "optimizer": torch.optim.AdamW(chosen)}

    first = check_continues(tmp_path, build)
    assert list(first.optimizer.state) == [first.model.down.weight, first.model.up.weight]


def test_moments_of_a_parameter_frozen_later_are_kept(tmp_path: Path) -> None:
    """A parameter that trained, then was frozen and saved, goes on with its moments when it thaws."""

    def build() -> dict[str, Any]:
        model = small_model()
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), momentum=0.9)}

    first = Life(tmp_path, build, seed=0)
    first.run(2)
    first.model[0].requires_grad_(False)
    first.run(3)
    first.manager.save(mode="sync")
    second = Life(tmp_path, build, seed=1)
    second.manager.restore()
    assert second.bits() == first.bits()
    first.model[0].requires_grad_(True)
    records, ended = first.run(5), first.bits()
    second.manager.restore()
    assert second.run(5) == records
    assert second.bits() == ended


def test_an_empty_momentum_buffer_comes_back_empty(tmp_path: Path) -> None:
    """``None`` in the optimizer's state replaces a live tensor, and a tensor a live ``None``."""

    def build() -> dict[str, Any]:
        model = small_model()
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), momentum=0.9)}

    first, second = Life(tmp_path, build, seed=0), Life(tmp_path, build, seed=1)
    for life, emptied in ((first, 0), (second, 2)):
        life.run(2)
        life.optimizer.state[life.model[emptied].weight]["momentum_buffer"] = None
    first.manager.save(mode="sync")
    second.manager.restore()
    assert second.bits() == first.bits()
    assert second.optimizer.state[second.model[0].weight] == {"momentum_buffer": None}


def grouped(groups: list[list[str]]) -> dict[str, Any]:
    model = small_model()
    named = dict(model.named_parameters())
    options = [{"params": [named[n] for n in g], "lr": 0.01 * i} for i, g in enumerate(groups, 1)]
    return {"model": model, "optimizer": torch.optim.AdamW(options)}


WEIGHTS, BIASES = ["0.weight", "2.weight"], ["0.bias", "2.bias"]


@pytest.mark.parametrize(
    "groups", [[BIASES, WEIGHTS], [BIASES[::-1], WEIGHTS[::-1]], [WEIGHTS, ["2.bias"], ["0.bias"]]]
)
def test_parameter_groups_are_matched_by_name(tmp_path: Path, groups: list[list[str]]) -> None:
    """Moments and hyperparameters find their parameter in whatever order and groups it stands."""
    first = Life(tmp_path, lambda: grouped([WEIGHTS, BIASES]), seed=0)
    first.optimizer.param_groups[1]["betas"] = (0.5, 0.6)
    first.run(2)
    first.manager.save(mode="sync")
    second = Life(tmp_path, lambda: grouped(groups), seed=1)
    second.manager.restore()
    after_restore = random_bits()
    for group in second.optimizer.param_groups:
        is_weights = group["params"][0].ndim == 2
        expected = (0.01, (0.9, 0.999)) if is_weights else (0.02, (0.5, 0.6))
        assert (group["lr"], group["betas"]) == expected
    found = []
    for life in (second, first):
        life.manager.restore()
        assert random_bits() == after_restore
        life.run(4)
        found.append({k: v for k, v in life.bits().items() if "group" not in k})
    assert found[0] == found[1]


def test_a_group_of_two_saved_groups_is_refused(tmp_path: Path) -> None:
    """Where two saved groups would meet in one, which hyperparameters count is not guessed."""
    Life(tmp_path, lambda: grouped([WEIGHTS, BIASES]), seed=0).manager.save(mode="sync")
    life = Life(tmp_path, lambda: grouped([WEIGHTS + BIASES]), seed=1)
    before = life.bits()
    with pytest.raises(MismatchError, match="group 0 here holds parameters of 2 saved groups"):
        life.manager.restore()
    assert life.bits() == before


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: schedulers.LambdaLR(o, lambda step: 0.9**step),
    "warmup and cosine": lambda o: schedulers.SequentialLR(
        o,
        [schedulers.LinearLR(o, 0.1, total_iters=3), schedulers.CosineAnnealingLR(o, 6)],
        milestones=[3],
    ),
    "one cycle": lambda o: schedulers.OneCycleLR(o, max_lr=0.1, total_steps=12),
    "milestones": lambda o: schedulers.MultiStepLR(o, [2, 2, 4]),
    "plateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0, threshold=0.5),
    "chained": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.5, 3), schedulers.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "cyclic": lambda o: schedulers.CyclicLR(o, 0.001, 0.1, step_size_up=2),
    "restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2, 2),
}


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_any_schedule_continues(tmp_path: Path, name: str, tensor_lr: bool, at: int) -> None:
    """Every later learning rate is the unbroken run's, as a number or as a tensor."""

    def build() -> dict[str, Any]:
        model = small_model()
        lr = torch.tensor(0.05) if tensor_lr else 0.05
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5, foreach=False)
        return {"model": model, "optimizer": optimizer, "scheduler": SCHEDULERS[name](optimizer)}

    check_continues(tmp_path, build, at)


def test_an_average_of_the_weights_continues(tmp_path: Path) -> None:
    """A second module in ``extra`` comes back with its buffers and its count."""

    def build() -> dict[str, Any]:
        model = small_model()
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1), "ema": ema}

    first = check_continues(tmp_path, build)
    assert int(first.extra["ema"].n_averaged) == 5


def test_state_without_a_parameter_is_refused(tmp_path: Path) -> None:
    """State under a key that is no parameter would be lost; it is refused before anything is written."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state["global"] = {"count": 1}
    with pytest.raises(UnencodableStateError, match="'global'"):
        CheckpointManager(tmp_path, TrainState(model=model, optimizer=optimizer)).save(mode="sync")
    assert list(tmp_path.iterdir()) == []
