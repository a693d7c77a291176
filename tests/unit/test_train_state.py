"""The training state through a whole save and restore: exact to the bit, whatever a run consists of."""

from __future__ import annotations

import collections
import enum
import math
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset

from fsdp_ckpt import CheckpointManager, MismatchError, ResumableSampler, TrainState, make_loader
from tests.bits import bits, live_bits, random_bits

NUM_SAMPLES = 20
BATCH = 4


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


class Net(nn.Module):
    """Dropout, batch statistics, a 0-d and an empty parameter, int and bool and derived buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)
        self.drop = nn.Dropout(0.4)
        self.last = nn.Linear(5, 2, bias=False)
        self.scale = nn.Parameter(torch.rand(()))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.phase = nn.Parameter(torch.rand(2, dtype=torch.complex64))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("used", torch.tensor([True, False]))
        self.register_buffer("derived", torch.rand(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        hidden = self.norm(self.first(x))
        self.mask = self.drop(torch.ones_like(hidden))
        return self.last(hidden * self.mask) * self.scale * self.phase.abs() + self.nothing.sum()


class Noisy(Dataset[tuple[int, torch.Tensor]]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.rand(3) + random.random() + float(np.random.rand())


class Job:
    """One life of a job in which everything is random and nothing is shared with an earlier life."""

    def __init__(self, root: Path, seed: int) -> None:
        seed_everything(seed)
        self.model = Net()
        parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
                {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=0.01,
        )
        self.scheduler = schedulers.LambdaLR(self.optimizer, lambda step: 0.9**step)
        self.sampler = ResumableSampler(NUM_SAMPLES, seed=3)
        self.loader = make_loader(Noisy(), self.sampler, batch_size=BATCH)
        self.generator = np.random.default_rng(seed)
        self.state = TrainState(
            model=self.model,
            optimizer=self.optimizer,
            lr_scheduler=self.scheduler,
            data=self.sampler,
            generators={"augment": self.generator},
        )
        self.manager = CheckpointManager(root, self.state)

    def run(self, until: int, save_at: Iterable[int] = ()) -> list[Any]:
        """Train on; return loss, learning rate, sample ids, dropout mask and random draws per step."""
        records = []
        progress = self.state.progress
        if progress.step in save_at:
            self.manager.save()
        while progress.step < until:
            for ids, batch in self.loader:
                loss = (self.model(batch) + torch.rand(()) + self.generator.random()).abs().mean()
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.scheduler.step()
                progress.advance(samples=BATCH)
                lr = self.scheduler.get_last_lr()
                draws = random.random(), np.random.rand()
                records.append(bits([progress.step, loss, lr, ids, self.model.mask, draws]))
                if progress.step in save_at:
                    self.manager.save()
                if progress.step == until:
                    return records
            progress.next_epoch()
        return records

    def bits(self) -> dict[str, Any]:
        found = live_bits(
            self.model,
            self.optimizer,
            scheduler=self.scheduler,
            data=self.sampler,
            progress=self.state.progress,
        )
        del found["model.derived"]
        return found | {"generator": bits(self.generator.bit_generator.state)}


@pytest.mark.parametrize("killed_at", [0, 1, 4, 5, 7])
def test_a_resumed_run_goes_on_to_the_bit(tmp_path: Path, killed_at: int) -> None:
    """Losses, rates, samples, masks, weights, moments and random states are those of the unbroken run."""
    whole = Job(tmp_path / "none", seed=0)
    records = whole.run(9)
    Job(tmp_path / "run", seed=0).run(killed_at, save_at=[killed_at])
    second = Job(tmp_path / "run", seed=1)
    report = second.manager.restore()
    assert (report.step, report.missing, report.unexpected) == (killed_at, (), ())
    assert second.run(8, save_at=[8]) == records[killed_at:8]
    third = Job(tmp_path / "run", seed=2)
    assert third.manager.restore().step == 8
    assert third.bits() == second.bits()
    assert third.run(9) == records[8:]
    assert third.bits() == whole.bits()


def test_saving_never_changes_training(tmp_path: Path) -> None:
    """A run that saves at steps 0, 3 and 5 ends as one that never saves."""
    never = Job(tmp_path / "none", seed=0)
    records, ended = never.run(7), never.bits()
    often = Job(tmp_path / "run", seed=0)
    assert often.run(7, save_at=[0, 3, 5]) == records
    assert often.bits() == ended
    assert [info.step for info in often.manager.checkpoints()] == [5, 3, 0]


def test_collecting_changes_nothing(tmp_path: Path) -> None:
    """Taking the state of a fresh optimizer makes no state, draws no number and writes no tensor."""
    job = Job(tmp_path, seed=0)
    before = job.bits()
    versions = [t._version for t in (*job.model.parameters(), *job.model.buffers())]
    job.state.collect()
    assert job.bits() == before
    assert dict(job.optimizer.state) == {}
    assert versions == [t._version for t in (*job.model.parameters(), *job.model.buffers())]


def test_loading_takes_no_step(tmp_path: Path) -> None:
    """A fresh optimizer gets its state without a step: no hook runs, the count is the saved one."""
    saved = Job(tmp_path, seed=0)
    saved.run(2, save_at=[2])
    fresh = Job(tmp_path, seed=1)

    def refuse(*_: Any) -> None:
        raise AssertionError("a step was taken")

    fresh.optimizer.register_step_pre_hook(refuse)
    fresh.optimizer.register_step_post_hook(refuse)
    fresh.manager.restore()
    assert bits(fresh.model.state_dict()) == bits(saved.model.state_dict())
    assert {float(s["step"]) for s in fresh.optimizer.state.values()} == {2.0}


# --- optimizers, schedulers and extras ---


class Life:
    """A small job with any optimizer; ``build`` makes its parts anew."""

    def __init__(self, root: Path, build: Callable[[], dict[str, Any]], seed: int) -> None:
        seed_everything(seed)
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
    first.manager.save()
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
            manager.save()
        else:
            manager.restore()
        states.append(live_bits(model, optimizer))
    assert states[0] == states[1]


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
    first.manager.save()
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
    first.manager.save()
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
    first.manager.save()
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
    Life(tmp_path, lambda: grouped([WEIGHTS, BIASES]), seed=0).manager.save()
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


def test_a_gradient_scaler_continues(tmp_path: Path) -> None:
    """Scale and growth count go on, through growth and after an overflow."""
    records = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        state = TrainState(model=model, optimizer=optimizer, extra={"scaler": scaler})
        manager = CheckpointManager(tmp_path, state)
        manager.restore()
        for step in range(state.progress.step, 8):
            loss = model(torch.rand(4, 3)).square().mean() * (float("inf") if step == 4 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            state.progress.advance()
            records.append((seed, step, bits([loss, scaler.state_dict(), model.state_dict()])))
            if state.progress.step == 3 and seed == 0:
                manager.save()
    assert [r[1:] for r in records[3:8]] == [r[1:] for r in records[8:]]
    assert [r[0] for r in records] == [0] * 8 + [1] * 5


def test_a_disabled_gradient_scaler_continues(tmp_path: Path) -> None:
    """An empty state is a state: saved, found and loaded."""
    model = nn.Linear(3, 1)
    state = TrainState(model=model, extra={"scaler": torch.amp.GradScaler("cpu", enabled=False)})
    manager = CheckpointManager(tmp_path, state)
    manager.save()
    report = manager.restore()
    assert (report.missing, report.unexpected) == ((), ())
    assert "extra" in report.preserved


def test_an_average_of_the_weights_continues(tmp_path: Path) -> None:
    """A second module in ``extra`` comes back with its buffers and its count."""

    def build() -> dict[str, Any]:
        model = small_model()
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1), "ema": ema}

    first = check_continues(tmp_path, build)
    assert int(first.extra["ema"].n_averaged) == 5


# --- tensors, values and generators ---

DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32),
    *(torch.float64, torch.complex32, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)
SHAPES = ((), (1,), (3, 5), (0,), (0, 4), (2, 0))


def test_every_dtype_and_shape_comes_back_to_the_bit(tmp_path: Path) -> None:
    """NaN payloads included; scalars and empty tensors too; a transposed buffer stays transposed."""

    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Module()
        for dtype in DTYPES:
            for i, shape in enumerate(SHAPES):
                high = 2 if dtype is torch.bool else 256
                size = math.prod(shape) * dtype.itemsize
                data = torch.randint(0, high, (size,), dtype=torch.uint8).view(dtype)
                model.register_buffer(f"{str(dtype)[6:]}_{i}", data.view(shape))
        model.register_buffer("transposed", torch.rand(3, 5).t())
        model.register_buffer("conjugate", torch.rand(3, dtype=torch.complex64).conj())
        return model

    saved, fresh = build(0), build(1)
    CheckpointManager(tmp_path, TrainState(model=saved)).save()
    CheckpointManager(tmp_path, TrainState(model=fresh)).restore()
    expected, found = live_bits(saved), live_bits(fresh)
    assert len(expected) == len(DTYPES) * len(SHAPES) + 3
    assert expected == found
    assert fresh.transposed.stride() == (1, 5)


def stored_keys(root: Path) -> set[str]:
    (shard,) = root.rglob("*.safetensors")
    with safe_open(shard, "pt") as file:
        return set(file.keys())


def test_only_persistent_buffers_are_saved(tmp_path: Path) -> None:
    """A derived buffer is not written, and keeps its live value through a restore."""
    saved, fresh = Job(tmp_path, seed=0), Job(tmp_path, seed=1)
    saved.manager.save()
    derived = bits(fresh.model.derived)
    fresh.manager.restore()
    assert bits(fresh.model.derived) == derived
    assert "model.seen" in stored_keys(tmp_path)
    assert not any("derived" in key for key in stored_keys(tmp_path))


class Remembering(nn.Module):
    """A module with state of its own making."""

    def __init__(self, memory: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(2))
        self.memory = memory

    def get_extra_state(self) -> Any:
        return self.memory

    def set_extra_state(self, state: Any) -> None:
        self.memory = state


@pytest.mark.parametrize(
    "memory",
    [
        torch.rand(3),
        {"count": 3, "seen": {1: torch.rand(2), "nothing": {}}, "list": [torch.rand(1), "a"]},
        (1, float("nan")),
        b"\x80raw",
        {},
        None,
    ],
    ids=["tensor", "nested", "tuple", "bytes", "empty", "none"],
)
def test_what_modules_make_up_comes_back(tmp_path: Path, memory: Any) -> None:
    """``get_extra_state`` is saved, ``set_extra_state`` is called with it, whatever it is."""
    saved = nn.Sequential(nn.Linear(1, 1), Remembering(memory))
    fresh = nn.Sequential(nn.Linear(1, 1), Remembering("nothing yet"))
    CheckpointManager(tmp_path, TrainState(model=saved)).save()
    report = CheckpointManager(tmp_path, TrainState(model=fresh)).restore()
    assert (report.missing, report.unexpected) == ((), ())
    assert bits(fresh[1].memory) == bits(memory)
    assert bits(fresh[1].weight) == bits(saved[1].weight)


class Holder:
    """Hands its value out and takes it back."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.value = state


class Color(enum.Enum):
    RED = 1


VALUES: dict[str, Any] = {
    "numpy scalars": [np.float32(0.1), np.int64(-3), np.bool_(True), np.float64("nan"), np.str_("é")],
    "numpy arrays": [np.arange(6, dtype=">i4").reshape(2, 3), np.array(1.5), np.empty((0, 2))],
    "tuples": (1, ("a", (2.5, ())), [(), (None,)]),
    "int keys": {1: "one", 0: {2: (3,)}, -7: {}},
    "mixed keys": {1: "int", "a": "str", (1, 2): "tuple", None: "none", 2.5: "float"},
    "floats": [float("nan"), float("inf"), -float("inf"), -0.0, 5e-324, 0.1],
    "bytes": [b"", b"\x00\xff\x80", bytearray(b"x")],
    "empty": {"a": {}, "b": {"c": {}}, "d": [], "e": (), "f": ""},
    "containers": [{3}, frozenset({4}), collections.deque([1, 2], 5), collections.Counter("aab")],
    "ordered": collections.OrderedDict(b=1, a=collections.OrderedDict()),
    "torch": [torch.float32, torch.device("cpu"), torch.Size([2, 3]), torch.strided],
    "other": [2**70, -(2**70), 1 + 2j, range(1, 9, 2), Color.RED, "\ud800 \u2028", True, None],
    "tensors": {"list": [torch.rand(2), 1], "tuple": (torch.rand(()), {"x": torch.zeros(0)})},
    "marks": {"$": "tuple", "v": [1]},
}


@pytest.mark.parametrize("name", VALUES)
def test_values_come_back_into_the_live_objects_as_they_were(tmp_path: Path, name: str) -> None:
    """Types, bits, order and nesting of plain data survive, at the top of a part and inside it."""
    saved, inner, live = Holder(VALUES[name]), Holder({"in": {"side": VALUES[name]}}), Holder(None)
    model = nn.Linear(1, 1)
    CheckpointManager(tmp_path, TrainState(model=model, extra={"a": saved, "b": inner})).save()
    live_inner = Holder({})
    state = TrainState(model=model, extra={"a": live, "b": live_inner})
    CheckpointManager(tmp_path, state).restore()
    assert bits(live.value) == bits(VALUES[name])
    assert bits(list(live.value)) == bits(list(VALUES[name]))
    assert bits(live_inner.value) == bits({"in": {"side": VALUES[name]}})


def test_generators_of_the_program_come_back(tmp_path: Path) -> None:
    """Each named generator draws on where it stood, whatever its kind and the order of their names."""

    def build(seed: int) -> dict[str, Any]:
        return {
            "python": random.Random(seed),
            "pcg": np.random.default_rng(seed),
            "philox": np.random.Generator(np.random.Philox(seed)),
            "legacy": np.random.RandomState(seed),
            "torch": torch.Generator().manual_seed(seed),
        }

    def draw(of: dict[str, Any]) -> Any:
        draws = [of["python"].gauss(), of["pcg"].normal(), of["philox"].random()]
        return bits([*draws, of["legacy"].normal(), torch.rand(2, generator=of["torch"])])

    saved, fresh = build(0), dict(reversed(build(1).items()))
    draw(saved)
    CheckpointManager(tmp_path, TrainState(generators=saved)).save()
    globally = random_bits()
    expected = draw(saved)
    torch.rand(1), random.random(), np.random.rand()
    CheckpointManager(tmp_path, TrainState(generators=fresh)).restore()
    assert draw(fresh) == expected
    assert random_bits() == globally


# --- tied parameters ---


class Tied(nn.Module):
    def __init__(self, tie: bool, swap: bool = False) -> None:
        super().__init__()
        for name in ("head", "embed") if swap else ("embed", "head"):
            setattr(self, name, nn.Linear(3, 3, bias=False))
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))


def tied_state(tie: bool, swap: bool = False, steps: int = 0) -> TrainState:
    model = Tied(tie, swap)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.rand(2, 3)).sum().backward()
        optimizer.step()
    return TrainState(model=model, optimizer=optimizer)


def test_a_tied_parameter_is_stored_once_and_stays_tied(tmp_path: Path) -> None:
    """Two names of one tensor: one entry with one set of moments, and one tensor after the restore."""
    saved, fresh = tied_state(True, steps=2), tied_state(True)
    CheckpointManager(tmp_path, saved).save()
    CheckpointManager(tmp_path, fresh).restore()
    assert {k for k in stored_keys(tmp_path) if k.startswith(("model", "optimizer"))} == {
        "model.embed.weight",
        *(f"optimizer.state.embed.weight.{key}" for key in ("step", "exp_avg", "exp_avg_sq")),
    }
    assert fresh.model.head.weight is fresh.model.embed.weight
    assert live_bits(fresh.model, fresh.optimizer) == live_bits(saved.model, saved.optimizer)


def test_which_name_of_a_tied_parameter_comes_first_does_not_matter(tmp_path: Path) -> None:
    """A model that lists the two names the other way round gets weights and moments."""
    saved, fresh = tied_state(True, steps=2), tied_state(True, swap=True)
    CheckpointManager(tmp_path, saved).save()
    CheckpointManager(tmp_path, fresh).restore()
    assert bits(fresh.model.embed.weight) == bits(saved.model.embed.weight)
    (expected,), (found,) = saved.optimizer.state.values(), fresh.optimizer.state.values()
    assert bits(found) == bits(expected)


def test_a_tied_parameter_loads_into_two(tmp_path: Path) -> None:
    """Untied names both get the value; that one of them has no moments must be allowed."""
    saved = tied_state(True, steps=1)
    CheckpointManager(tmp_path, saved).save()
    weights = tied_state(False)
    CheckpointManager(tmp_path, TrainState(model=weights.model)).restore(
        allow_unexpected=["optimizer.*"]
    )
    fresh = tied_state(False)
    before = live_bits(fresh.model, fresh.optimizer)
    manager = CheckpointManager(tmp_path, fresh)
    with pytest.raises(MismatchError, match=r"optimizer\.head\.weight: missing"):
        manager.restore()
    assert live_bits(fresh.model, fresh.optimizer) == before
    assert manager.restore(allow_missing=["optimizer.head.weight"]).missing == (
        "optimizer.head.weight",
    )
    for model in (weights.model, fresh.model):
        assert model.head.weight is not model.embed.weight
        for weight in (model.head.weight, model.embed.weight):
            assert bits(weight) == bits(saved.model.embed.weight)
    assert list(fresh.optimizer.state) == [fresh.model.embed.weight]


def test_two_parameters_do_not_load_into_a_tied_one(tmp_path: Path) -> None:
    """Where the checkpoint has two values for one tensor, neither is guessed."""
    CheckpointManager(tmp_path, tied_state(False)).save()
    fresh = tied_state(True)
    before = live_bits(fresh.model, fresh.optimizer)
    with pytest.raises(MismatchError, match=r"embed.weight and head.weight are one tensor here, 2"):
        CheckpointManager(tmp_path, fresh).restore()
    assert live_bits(fresh.model, fresh.optimizer) == before


def test_untied_names_of_another_shape_are_refused(tmp_path: Path) -> None:
    """A tied value is not copied into a tensor that it does not fit."""
    CheckpointManager(tmp_path, TrainState(model=Tied(True))).save()
    fresh = Tied(False)
    fresh.head = nn.Linear(3, 4, bias=False)
    before = live_bits(fresh)
    with pytest.raises(MismatchError, match=r"model\.head\.weight"):
        CheckpointManager(tmp_path, TrainState(model=fresh)).restore()
    assert live_bits(fresh) == before
