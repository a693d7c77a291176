"""What docs/moving.md says to write works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from fsdp_ckpt import CheckpointManager, TrainState
from tests.bits import bits, live_bits

PAGE = Path(__file__).resolve().parents[2] / "docs/moving.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def run(text: str, **given: Any) -> dict[str, Any]:
    """Run the block that holds ``text``, with the page's shared variables; return its variables."""
    (block,) = [block for block in BLOCKS if text in block]
    found: dict[str, Any] = {"__name__": "__main__", **given}
    exec(compile(block, str(PAGE), "exec"), found)
    return found


def make(seed: int, *, trained: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (1 + seed))
    if trained:
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def weights_and_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    found = live_bits(model, optimizer)
    return {name: value for name, value in found.items() if name != "random"}


def check_restores(root: str, step: int, expected: dict[str, Any]) -> None:
    """A new program gets from ``root`` what the old checkpoint held."""
    model, optimizer = make(5, trained=False)
    state = TrainState(model=model, optimizer=optimizer)
    with CheckpointManager(root, state) as manager:
        assert manager.restore(allow_unexpected=["lr_scheduler.*"]).step == step
    assert weights_and_moments(model, optimizer) == expected


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_plain_dcp_gives_back_what_it_saved() -> None:
    """Tensors and values come back through plain ``dcp.save`` and ``dcp.load``."""
    torch.manual_seed(0)
    found = run("planner=ShardSavePlanner()")
    assert bits(found["loaded"]) == bits(found["state"])


def test_a_checkpoint_of_dcp() -> None:
    """Weights, moments and hyperparameters are those that DCP had written."""
    model, optimizer = make(0, trained=True)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id="old-dcp")
    other, its = make(1, trained=False)
    run('checkpoint_id="old-dcp"', model=other, optimizer=its)
    check_restores("run-from-dcp", 500, weights_and_moments(model, optimizer))


def test_a_file_of_torch_save() -> None:
    """Likewise from one file."""
    model, optimizer = make(0, trained=True)
    old = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}
    torch.save(old, "old.pt")
    other, its = make(1, trained=False)
    run('torch.load("old.pt"', model=other, optimizer=its)
    check_restores("run-from-torch", 7, weights_and_moments(model, optimizer))


def test_a_program_of_accelerate() -> None:
    """What is in the wrappers is saved, and restores into a program without them."""
    pytest.importorskip("accelerate")
    model, optimizer = make(0, trained=True)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    expected = weights_and_moments(model, optimizer)
    run("Accelerator(cpu=True)", model=model, optimizer=optimizer, scheduler=scheduler)
    check_restores("run-accelerate", 1, expected)
