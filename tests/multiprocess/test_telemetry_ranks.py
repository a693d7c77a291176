"""Telemetry of real ranks: one start for all, each rank's own lines, and a report of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_ckpt import CheckpointManager, SavePolicy, TelemetryOptions, TrainState
from fsdp_ckpt.report.digest import digest
from fsdp_ckpt.report.reading import read_telemetry
from fsdp_ckpt.storage.local import LocalStore
from fsdp_ckpt.testing import run_ranks

pytestmark = pytest.mark.few_ranks


def train_twice(root: str) -> list[int]:
    """Train, and go on from what there is as a job that was started again; return the steps reached."""
    return [train(root, until) for until in (3, 6)]


def train(root: str, until: int) -> int:
    """Go on from what there is, saving every other step."""
    model = nn.Linear(8, 8)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    state = TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters()))
    saves = SavePolicy(every_steps=2, on_signal=False)
    with CheckpointManager(root, state, save=saves, telemetry=TelemetryOptions()) as manager:
        manager.restore()
        while state.progress.step < until:
            state.progress.advance()
            manager.after_step()
    return state.progress.step


def test_two_starts_of_two_ranks_are_one_report(tmp_path: Path) -> None:
    """Both ranks' spans of each save, the restore in between, and no rank without lines."""
    root = str(tmp_path / "run")
    assert run_ranks(train_twice, 2, root).values == [[3, 6], [3, 6]]
    run = digest(read_telemetry(LocalStore(root)))
    assert [life.world_size for life in run.lives] == [2, 2]
    assert [life.has_ended for life in run.lives] == [True, True]
    saves = [(save.life, save.step, save.outcome) for save in run.saves]
    assert saves == [(0, 2, "committed"), (1, 4, "committed"), (1, 6, "committed")]
    for save in run.saves:
        assert [rank.rank for rank in save.ranks] == [0, 1]
        first, second = save.ranks
        assert first.spans.keys() == {"wait", "plan", "copy", "persist", "seal", "publish"}
        assert second.spans.keys() == first.spans.keys() - {"publish"}
        assert (first.num_bytes or 0) + (second.num_bytes or 0) == save.num_bytes
    assert [(r.life, r.step) for r in run.restores if r.step is not None] == [(1, 2)]
    assert run.incidents == ()
    assert run.notes == ()
