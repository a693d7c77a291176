"""A run through a save and a restore: what follows is the unbroken run, to the bit."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import Dataset

from fsdp_ckpt import CheckpointManager, ResumableSampler, TrainState, make_loader
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
            self.manager.save(mode="sync")
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
                    self.manager.save(mode="sync")
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
    CheckpointManager(tmp_path, TrainState(generators=saved)).save(mode="sync")
    globally = random_bits()
    expected = draw(saved)
    torch.rand(1), random.random(), np.random.rand()
    CheckpointManager(tmp_path, TrainState(generators=fresh)).restore()
    assert draw(fresh) == expected
    assert random_bits() == globally
