"""A file that is begun before the save is agreed on: whatever goes wrong then, the next save goes well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_ckpt import CheckpointError, CheckpointManager, SaveOptions, TrainState
from fsdp_ckpt.options import SaveMode, WriterKind
from fsdp_ckpt.saving import staging
from fsdp_ckpt.snapshot.head_start import HeadStart
from fsdp_ckpt.testing import run_ranks
from fsdp_ckpt.writer import ProcessWriter, ThreadWriter
from tests.local_files import open_files

PATIENCE_S = 60.0
WRITERS: tuple[WriterKind, ...] = ("thread", "process")


def fail(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("as planned")


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("target", ["begin", "SideStreams", "acquire", "submit"])
def test_a_failure_of_the_trainer_lets_go_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: WriterKind, target: str
) -> None:
    """Where the image, its streams, its memory or its writer cannot be had."""
    model = nn.Linear(300, 300)
    state = TrainState(model=model)
    options = SaveOptions(mode="async", writer=writer)
    with CheckpointManager(str(tmp_path), state, options=options, timeout_s=PATIENCE_S) as manager:
        for step in (1, 2, 3, 4):
            state.progress.step = step
            with torch.no_grad():
                model.weight.fill_(step)
            with monkeypatch.context() as patch:
                if step == 2:
                    owner = {
                        "begin": staging.ShardImage,
                        "SideStreams": staging,
                        "acquire": manager._pool,
                        "submit": ThreadWriter if writer == "thread" else ProcessWriter,
                    }[target]
                    patch.setattr(owner, target, fail)
                    with pytest.raises(CheckpointError, match="as planned"):
                        manager.save().wait()
                    continue
                manager.save().wait()
        with torch.no_grad():
            model.weight.zero_()
        assert manager.restore().step == 4
        assert bool((model.weight == 4).all())
        files = [path for path in tmp_path.rglob("*.safetensors")]
        assert len(files) == 3
        assert not [name for name in open_files() if name.startswith(f"{tmp_path}/")]


def spoiled(root: str, mode: SaveMode) -> list[bool]:
    """Copy early, and fail then; return whether what was saved is right, and how often that happened."""
    real, failed = HeadStart.copy, []

    def copy(self: HeadStart, *args: Any) -> None:
        real(self, *args)
        self.num_entries = 0
        failed.append(True)
        fail()

    HeadStart.copy = copy  # type: ignore[method-assign]
    model = nn.Linear(3000, 3000)
    state = TrainState(model=model)
    found = []
    with CheckpointManager(root, state, options=SaveOptions(mode=mode)) as manager:
        for step in (1, 2, 3):
            state.progress.step = step
            with torch.no_grad():
                model.weight.fill_(step)
            manager.save().wait()
            with torch.no_grad():
                model.weight.zero_()
            found.append(manager.restore().step == step and bool((model.weight == step).all()))
    return [*found, len(failed) == 2]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_copy_that_fails_early_is_made_anew(tmp_path: Path, mode: SaveMode) -> None:
    """What is in the file already is written once more."""
    for found in run_ranks(spoiled, 2, str(tmp_path), mode).values:
        assert found == [True, True, True, True]
