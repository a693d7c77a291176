"""A job that died after its files were whole, and before it could publish them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from fsdp_ckpt import (
    AlreadyCommittedError,
    CheckpointManager,
    CorruptCheckpointError,
    IncompleteWriteError,
    NotFoundError,
    StorageError,
    TrainState,
)
from fsdp_ckpt.commit import fence, publish
from fsdp_ckpt.commit.fence import Fences
from fsdp_ckpt.commit.publish import read_manifest
from fsdp_ckpt.commit.recover import find_complete_attempt, rebuild_manifest
from fsdp_ckpt.storage import open_store
from fsdp_ckpt.storage.local import LocalStore
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


def another_process() -> None:
    """Make what follows count as another job: a process is one, whatever managers it has."""
    fence._raised.clear()
    publish._renew_token()


def hide(folder: Path) -> Callable[[], object]:
    """Take a step's manifest and its file away; return how to bring the file back."""
    (folder / "manifest.json").unlink()
    (shard,) = folder.rglob("*.safetensors")
    late = shard.with_suffix(".late")
    shard.rename(late)
    return lambda: late.rename(shard)


def test_a_late_writer_does_not_bring_back_what_the_run_has_left(tmp_path: Path) -> None:
    """Once a later job has published, attempts from before are dead, also at higher steps."""
    first = Job(tmp_path)
    first.save(1)
    arrive = hide(first.save(5))
    another_process()
    second = Job(tmp_path, seed=1)
    report = second.manager.restore()
    assert (report.step, [s.step for s in report.skipped]) == (1, [5])
    second.save(2)
    arrive()
    another_process()
    third = Job(tmp_path, seed=2)
    report = third.manager.restore()
    assert (report.step, [s.step for s in report.skipped]) == (2, [5])
    with pytest.raises(NotFoundError):
        third.manager.restore(5)
    # The step can be saved anew, by another attempt.
    third.save(5)
    assert Job(tmp_path).manager.restore().step == 5


def test_looking_decides_nothing(tmp_path: Path) -> None:
    """A job that only restores, as an evaluation does, takes no attempt's chance."""
    job = Job(tmp_path)
    job.save(1)
    arrive = hide(job.save(2))
    another_process()
    assert Job(tmp_path).manager.restore().step == 1
    arrive()
    assert Job(tmp_path).manager.restore().step == 2


def test_a_job_that_was_cut_off_cannot_publish_over_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither late nor after its successor's first save; the successor goes on."""
    old = Job(tmp_path)
    old.save(1)
    mine, token = dict(fence._raised), publish._token
    another_process()
    new = Job(tmp_path, seed=1)
    new.manager.restore()
    new.save(2)
    fence._raised.update(mine)
    monkeypatch.setattr(publish, "_token", token)
    with pytest.raises(IncompleteWriteError, match="another job has gone on"):
        old.save(3)
    another_process()
    assert Job(tmp_path).manager.restore().step == 2
    assert len(list(tmp_path.glob("resumed-*.json"))) == 2


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
    assert find_complete_attempt(store, Fences(())) is None
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
    store = open_store(folder)
    assert find_complete_attempt(store, Fences(())).attempt == new.name  # type: ignore[union-attr]
    assert find_complete_attempt(store, Fences((new.name,))).attempt == new.name  # type: ignore[union-attr]
    assert find_complete_attempt(store, Fences(("29990101-x",))) is None


def test_a_store_that_fails_for_a_moment_costs_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be read now is an error, not a torn attempt."""
    job = Job(tmp_path)
    job.save(1)
    (job.save(2) / "manifest.json").unlink()
    real = LocalStore.read_into

    def unreachable(self: LocalStore, key: str, byte_offset: int, buffer: memoryview) -> None:
        raise StorageError(f"{key}: 503", retryable=True)

    monkeypatch.setattr(LocalStore, "read_into", unreachable)
    with pytest.raises(StorageError):
        job.manager.restore()
    monkeypatch.setattr(LocalStore, "read_into", real)
    assert job.manager.restore().step == 2


def test_only_what_was_found_damaged_is_replaced(tmp_path: Path) -> None:
    """Another job's whole checkpoint of the same step stays, though this one found an older one damaged."""
    first = Job(tmp_path)
    first.save(1)
    folder = first.save(2)
    (shard,) = folder.rglob("*.safetensors")
    truncate(shard)
    slow, quick = Job(tmp_path, seed=1), Job(tmp_path, seed=2)
    for job in (slow, quick):
        assert job.manager.restore().step == 1
    quick.save(2)
    committed = (folder / "manifest.json").read_bytes()
    with pytest.raises(AlreadyCommittedError):
        slow.save(2)
    assert (folder / "manifest.json").read_bytes() == committed
