"""What a root holds decides what a restore does: start fresh, take the newest whole one, or say why not."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_ckpt import (
    CheckpointError,
    CheckpointManager,
    CorruptCheckpointError,
    NotFoundError,
    StorageError,
    TrainState,
)
from tests.bits import live_bits, refused


class Job:
    """A model with an optimizer, trained a little further at every step that is saved."""

    def __init__(self, root: Path, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.state = TrainState(model=self.model, optimizer=self.optimizer)
        self.manager = CheckpointManager(root, self.state)

    def save(self, *steps: int) -> list[dict[str, Any]]:
        """Save at each of ``steps``; return what was saved."""
        saved = []
        for step in steps:
            self.model(torch.rand(4, 3)).square().sum().backward()
            self.optimizer.step()
            self.state.progress.step = step
            self.manager.save(mode="sync")
            saved.append(self.bits())
        return saved

    def bits(self) -> dict[str, Any]:
        return live_bits(self.model, self.optimizer, progress=self.state.progress)


# --- no checkpoint ---


def make_empty(root: Path) -> None:
    root.mkdir()


def make_foreign(root: Path) -> None:
    (root / "logs" / "deep").mkdir(parents=True)
    (root / "step-7").mkdir()
    (root / "step-0000000007").mkdir()
    (root / "step-000000007.bak").mkdir()
    (root / "step-000000007").write_text("a file")
    (root / "notes.txt").write_text("x")


@pytest.mark.parametrize("make", [None, make_empty, make_foreign])
def test_an_empty_root_starts_fresh_and_says_so(
    tmp_path: Path, make: Callable[[Path], None] | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Absent, empty, or full of other things: nothing changes, the report and one warning tell."""
    root = tmp_path / "run"
    if make is not None:
        make(root)
    job = Job(root)
    before = job.bits()
    with caplog.at_level(logging.INFO, "fsdp_ckpt"):
        report = job.manager.restore()
    assert report.is_fresh
    assert (report.step, report.skipped) == (None, ())
    assert job.bits() == before
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"no checkpoint under {root}" in record.getMessage()
    assert "starting fresh" in record.getMessage()
    assert job.manager.checkpoints() == []
    assert job.manager.latest() is None
    assert root.exists() is (make is not None)


def test_a_restored_run_is_not_fresh(tmp_path: Path) -> None:
    """The report of a restore names its step, attempt and number of ranks."""
    job = Job(tmp_path)
    job.save(3)
    report = job.manager.restore()
    info = job.manager.latest()
    assert info is not None
    assert (report.is_fresh, report.step, report.attempt) == (False, 3, info.attempt)
    assert report.saved_world_size == 1
    assert report.preserved == ("model", "optimizer", "progress", "rng")


def be_a_file(root: Path) -> None:
    root.write_text("x")


def be_a_loop(root: Path) -> None:
    root.symlink_to(root)


def be_below_a_file(root: Path) -> None:
    shutil.rmtree(root.parent)
    root.parent.write_text("x")


@pytest.mark.parametrize("spoil", [be_a_file, be_a_loop, be_below_a_file])
def test_an_unreadable_root_is_an_error(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    """It is never taken for an empty one, whichever call meets it first."""
    root = tmp_path / "parent" / "run"
    root.parent.mkdir()
    spoil(root)
    job = Job(root)
    for call in (
        job.manager.restore,
        lambda: job.manager.restore(allow_torn=True),
        lambda: job.manager.restore(3),
        job.manager.checkpoints,
        job.manager.latest,
    ):
        with refused(StorageError, job) as caught:
            call()
        assert str(root) in str(caught.value)
    with refused(CheckpointError, job):
        job.manager.save(mode="sync")


def test_an_unreadable_manifest_is_an_error(tmp_path: Path) -> None:
    """A checkpoint that cannot be read now is not passed over: it may be the newest good one."""
    job = Job(tmp_path)
    job.save(1, 2)
    manifest = tmp_path / "step-000000002" / "manifest.json"
    manifest.unlink()
    manifest.mkdir()
    with refused(StorageError, job):
        job.manager.restore()


def tear(root: Path, step: int) -> None:
    """Leave what a save leaves that died before its file was whole."""
    folder = root / f"step-{step:09d}"
    (folder / "manifest.json").unlink()
    (shard,) = folder.rglob("*.safetensors")
    os.truncate(shard, shard.stat().st_size - 1)


def test_an_absent_step_is_an_error_that_names_those_there(tmp_path: Path) -> None:
    """Committed steps are named, newest first; a torn attempt is not one of them."""
    job = Job(tmp_path)
    with refused(NotFoundError, job) as caught:
        job.manager.restore(3)
    assert "newest steps there: none" in str(caught.value)
    job.save(1, 2, 10, 11)
    tear(tmp_path, 11)
    for step in (3, 11):
        with refused(NotFoundError, job) as caught:
            job.manager.restore(step)
        assert f"no checkpoint of step {step}; newest steps there: 10, 2, 1" in str(caught.value)
        assert caught.value.step == step


def test_torn_attempts_alone_are_an_error_unless_allowed(tmp_path: Path) -> None:
    """Saves that were begun and none committed: something is wrong, unless the caller says it is not."""
    job = Job(tmp_path)
    job.save(1, 2)
    tear(tmp_path, 1)
    tear(tmp_path, 2)
    with refused(NotFoundError, job) as caught:
        job.manager.restore()
    assert "only 2 torn attempt(s), the newest of step 2" in str(caught.value)
    before = job.bits()
    report = job.manager.restore(allow_torn=True)
    assert report.is_fresh
    assert [(s.step, s.torn) for s in report.skipped] == [(2, True), (1, True)]
    assert job.bits() == before


def test_a_torn_attempt_is_passed_over(tmp_path: Path) -> None:
    """The newest committed checkpoint is restored; the torn one is reported."""
    job = Job(tmp_path)
    saved = job.save(1, 2)
    tear(tmp_path, 2)
    report = job.manager.restore()
    assert report.step == 1
    assert [(s.step, s.torn) for s in report.skipped] == [(2, True)]
    assert job.bits() == saved[0]


# --- damage ---


def shard_of(root: Path, step: int) -> Path:
    (shard,) = (root / f"step-{step:09d}").rglob("*.safetensors")
    return shard


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


def data_start(path: Path) -> int:
    content = path.read_bytes()
    return 8 + int.from_bytes(content[:8], "little")


SHARD_DAMAGE: dict[str, Callable[[Path], object]] = {
    "length field": lambda p: flip(p, 0),
    "header": lambda p: flip(p, 100),
    "header padding": lambda p: flip(p, data_start(p) - 1),
    "first data byte": lambda p: flip(p, data_start(p)),
    "last data byte": lambda p: flip(p, -1),
    "truncated by a byte": lambda p: os.truncate(p, p.stat().st_size - 1),
    "truncated to its header": lambda p: os.truncate(p, data_start(p)),
    "empty": lambda p: os.truncate(p, 0),
    "longer by a byte": lambda p: os.truncate(p, p.stat().st_size + 1),
    "missing": lambda p: p.unlink(),
    "missing folder": lambda p: shutil.rmtree(p.parent),
    "of another save": lambda p: p.write_bytes(shard_of(p.parents[2], 1).read_bytes()),
}
MANIFEST_DAMAGE: dict[str, Callable[[Path], object]] = {
    "manifest empty": lambda p: os.truncate(p, 0),
    "manifest truncated": lambda p: os.truncate(p, p.stat().st_size - 1),
    "manifest flipped": lambda p: flip(p, p.stat().st_size // 2),
    "manifest digest flipped": lambda p: flip(p, -3),
    "manifest of another step": lambda p: p.write_bytes(
        (p.parents[1] / "step-000000001" / p.name).read_bytes()
    ),
    "manifest is other JSON": lambda p: p.write_text(json.dumps([1])),
    "manifest is binary": lambda p: p.write_bytes(b"\x80\x02}q\x00."),
}


def damage(root: Path, step: int, name: str) -> str:
    """Damage a checkpoint; return the file's name relative to the checkpoint."""
    folder = root / f"step-{step:09d}"
    path = shard_of(root, step) if name in SHARD_DAMAGE else folder / "manifest.json"
    (SHARD_DAMAGE | MANIFEST_DAMAGE)[name](path)
    return str(path.relative_to(folder))


@pytest.mark.parametrize("name", SHARD_DAMAGE)
def test_a_damaged_shard_is_named(tmp_path: Path, name: str) -> None:
    """Asked for by step: an error with step, rank, file and tensor, and nothing has changed."""
    job = Job(tmp_path)
    job.save(1, 2)
    file = damage(tmp_path, 2, name)
    with refused(CorruptCheckpointError, job) as caught:
        job.manager.restore(2)
    error = caught.value
    assert (error.step, error.rank, error.key) == (2, 0, file)
    for words in ("step 2", "rank 0", file, "model.", "tensors"):
        assert words in str(error)


@pytest.mark.parametrize("name", MANIFEST_DAMAGE)
def test_a_damaged_manifest_is_named(tmp_path: Path, name: str) -> None:
    """Asked for by step: an error with step and file, and nothing has changed."""
    job = Job(tmp_path)
    job.save(1, 2)
    damage(tmp_path, 2, name)
    with refused(CorruptCheckpointError, job) as caught:
        job.manager.restore(2)
    assert caught.value.step == 2
    assert str(tmp_path / "step-000000002") in str(caught.value)


@pytest.mark.parametrize("name", [*SHARD_DAMAGE, *MANIFEST_DAMAGE])
def test_a_damaged_newest_falls_back(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The one before is restored to the bit; report and log say what was passed over, and why."""
    job = Job(tmp_path)
    saved = job.save(1, 2, 3)
    damage(tmp_path, 3, name)
    fresh = Job(tmp_path, seed=1)
    report = fresh.manager.restore()
    assert report.step == 2
    assert fresh.bits() == saved[1]
    (skipped,) = report.skipped
    assert (skipped.step, skipped.torn) == (3, False)
    assert any(skipped.reason in record.getMessage() for record in caplog.records)
    assert str(tmp_path / "step-000000003") in skipped.reason


@pytest.mark.parametrize(
    "name", [n for n in (SHARD_DAMAGE | MANIFEST_DAMAGE) if "another" not in n]
)
def test_damage_of_the_only_one_is_an_error(tmp_path: Path, name: str) -> None:
    """A run with a checkpoint never starts fresh by itself, torn ones allowed or not."""
    job = Job(tmp_path)
    job.save(2)
    damage(tmp_path, 2, name)
    for allow_torn in (False, True):
        with refused(CorruptCheckpointError, job) as caught:
            job.manager.restore(allow_torn=allow_torn)
        assert caught.value.step == 2
        assert "step-000000002" in str(caught.value)


def test_several_damaged_ones_are_all_passed_over(tmp_path: Path) -> None:
    """Damage that shows in a listing, in a header and in the data: the first whole one wins."""
    job = Job(tmp_path)
    saved = job.save(1, 2, 3, 4, 5)
    for step, name in ((5, "last data byte"), (4, "missing"), (3, "header"), (2, "manifest empty")):
        damage(tmp_path, step, name)
    report = job.manager.restore()
    assert report.step == 1
    assert [s.step for s in report.skipped] == [5, 4, 3, 2]
    assert job.bits() == saved[0]


def test_every_flipped_bit_of_the_data_is_found(tmp_path: Path) -> None:
    """Wherever a byte of a tensor is changed, the restore refuses and names a tensor that lies there."""
    job = Job(tmp_path)
    job.save(1)
    shard = shard_of(tmp_path, 1)
    content = shard.read_bytes()
    for position in range(data_start(shard), len(content), 97):
        flip(shard, position)
        with refused(CorruptCheckpointError, job):
            job.manager.restore(1)
        shard.write_bytes(content)
    job.manager.restore(1)
