"""A job that died after its files were whole, and before it could publish them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from fsdp_ckpt import CheckpointManager, CorruptCheckpointError, NotFoundError, TrainState
from fsdp_ckpt.commit.publish import read_manifest
from fsdp_ckpt.commit.recover import (
    abandon_attempts,
    publish_complete_attempt,
    rebuild_manifest,
)
from fsdp_ckpt.storage import open_store
from tests.bits import live_bits


class Job:
    def __init__(self, root: Path, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.rand_like(parameter)
        self.optimizer.step()
        self.state = TrainState(model=self.model, optimizer=self.optimizer)
        self.manager = CheckpointManager(root, self.state)

    def save(self, step: int) -> Path:
        self.state.progress.step = step
        info = self.manager.save(mode="sync").wait()
        assert info is not None
        return Path(info.url)

    def bits(self) -> object:
        return live_bits(self.model, self.optimizer, progress=self.state.progress)


def test_a_complete_attempt_is_published_and_restored_to_the_bit(tmp_path: Path) -> None:
    """What the manifest would have said comes back from the files, but for what only it may hold."""
    job = Job(tmp_path)
    job.save(1)
    with torch.no_grad():
        job.model[0].weight.add_(1)
    folder = job.save(2)
    expected, store = job.bits(), open_store(folder)
    published = read_manifest(store)
    (folder / "manifest.json").unlink()
    rebuilt = rebuild_manifest(store, published.attempt)
    for name in ("step", "generation", "world_size", "created", "tensors", "files", "values"):
        assert getattr(rebuilt, name) == getattr(published, name)
    again = Job(tmp_path, seed=1)
    assert again.manager.restore().step == 2
    assert again.bits() == expected
    assert read_manifest(store) == rebuilt
    assert again.manager.latest().step == 2  # type: ignore[union-attr]


def test_a_step_that_is_asked_for_is_recovered_too(tmp_path: Path) -> None:
    """By step, as without."""
    folder = Job(tmp_path).save(4)
    (folder / "manifest.json").unlink()
    assert Job(tmp_path).manager.restore(4).step == 4


def test_what_was_passed_over_is_never_published(tmp_path: Path) -> None:
    """Once a run went on from an older checkpoint, a late writer cannot bring the newer one back."""
    job = Job(tmp_path)
    job.save(1)
    folder = job.save(2)
    (folder / "manifest.json").unlink()
    (shard,) = folder.rglob("*.safetensors")
    late = shard.with_suffix(".late")
    shard.rename(late)
    assert job.manager.restore().step == 1
    late.rename(shard)
    again = Job(tmp_path)
    report = again.manager.restore()
    assert report.step == 1
    assert [s.step for s in report.skipped] == [2]
    with pytest.raises(NotFoundError):
        again.manager.restore(2)
    # The step can be saved anew, by another attempt.
    again.save(2)
    assert Job(tmp_path).manager.restore().step == 2


def truncate(shard: Path) -> None:
    os.truncate(shard, shard.stat().st_size - 1)


def blank_header(shard: Path) -> None:
    with shard.open("r+b") as file:
        file.write(bytes(4096))


def empty(shard: Path) -> None:
    shard.write_bytes(b"")


def lying_length(shard: Path) -> None:
    with shard.open("r+b") as file:
        file.write((2**62).to_bytes(8, "little"))


def foreign(shard: Path) -> None:
    shard.rename(shard.parent / "rank-00000-of-00002.safetensors")


def another_attempt(shard: Path) -> None:
    shard.parent.rename(shard.parent.parent / "20200101T000000-000000000000")


@pytest.mark.parametrize(
    "damage", [truncate, blank_header, empty, lying_length, foreign, another_attempt]
)
def test_what_is_not_whole_is_not_published(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """A file that is short, without its header, or of another save."""
    job = Job(tmp_path)
    job.save(1)
    folder = job.save(2)
    (folder / "manifest.json").unlink()
    (shard,) = folder.rglob("*.safetensors")
    damage(shard)
    store = open_store(folder)
    (attempt,) = store.list_folders()
    with pytest.raises((CorruptCheckpointError, NotFoundError)):
        rebuild_manifest(store, attempt)
    assert publish_complete_attempt(store) is None
    assert job.manager.restore().step == 1


def test_the_newest_complete_attempt_wins(tmp_path: Path) -> None:
    """Of two attempts at one step the later one is published; a dead one beside it does not matter."""
    job = Job(tmp_path)
    folder = job.save(2)
    (old,) = (p for p in folder.iterdir() if p.is_dir())
    kept = tmp_path / old.name
    shutil.move(old, kept)
    (folder / "manifest.json").unlink()
    job.save(2)
    (new,) = (p for p in folder.iterdir() if p.is_dir())
    (folder / "manifest.json").unlink()
    shutil.move(kept, old)
    (folder / "29990101T000000-dead").mkdir()
    assert publish_complete_attempt(open_store(folder)).attempt == new.name  # type: ignore[union-attr]


def test_abandoning_twice_is_fine(tmp_path: Path) -> None:
    """Every restore that passes over an attempt says so."""
    job = Job(tmp_path)
    folder = job.save(2)
    (folder / "manifest.json").unlink()
    for _ in range(2):
        abandon_attempts(open_store(folder))
    assert publish_complete_attempt(open_store(folder)) is None
    (mark,) = folder.rglob("abandoned.json")
    assert json.loads(mark.read_text()) == {}
