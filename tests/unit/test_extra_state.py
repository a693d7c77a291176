"""Scalers, and any plain data that a run keeps, come back into the live objects as they were."""

from __future__ import annotations

import collections
import enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fsdp_ckpt import CheckpointError, CheckpointManager, TrainState
from tests.bits import bits, live_bits


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
    "numpy scalars": [
        np.float32(0.1),
        np.int64(-3),
        np.bool_(True),
        np.float64("nan"),
        np.str_("é"),
    ],
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
    CheckpointManager(tmp_path, TrainState(model=model, extra={"a": saved, "b": inner})).save(
        mode="sync"
    )
    live_inner = Holder({})
    state = TrainState(model=model, extra={"a": live, "b": live_inner})
    CheckpointManager(tmp_path, state).restore()
    assert bits(live.value) == bits(VALUES[name])
    assert bits(list(live.value)) == bits(list(VALUES[name]))
    assert bits(live_inner.value) == bits({"in": {"side": VALUES[name]}})


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
                manager.save(mode="sync")
    assert [r[1:] for r in records[3:8]] == [r[1:] for r in records[8:]]
    assert [r[0] for r in records] == [0] * 8 + [1] * 5


def test_a_disabled_gradient_scaler_continues(tmp_path: Path) -> None:
    """An empty state is a state: saved, found and loaded."""
    model = nn.Linear(3, 1)
    state = TrainState(model=model, extra={"scaler": torch.amp.GradScaler("cpu", enabled=False)})
    manager = CheckpointManager(tmp_path, state)
    manager.save(mode="sync")
    report = manager.restore()
    assert (report.missing, report.unexpected) == ((), ())
    assert "extra.scaler" in report.preserved


@pytest.mark.parametrize("refuses", ["scaler", "schedule"])
def test_a_part_that_refuses_leaves_everything_as_it_was(tmp_path: Path, refuses: str) -> None:
    """What a part's own ``load_state_dict`` raises comes before model, optimizer and other parts change."""

    def build(seed: int, *, fits: bool) -> tuple[nn.Module, TrainState, Any]:
        torch.manual_seed(seed)
        model = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
        model(torch.rand(3, 2)).sum().backward()
        optimizer.step()
        scaler = torch.amp.GradScaler("cpu", enabled=fits or refuses != "scaler")
        schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
        if not fits and refuses == "schedule":
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        kept = torch.optim.lr_scheduler.StepLR(optimizer, 2 + seed)
        state = TrainState(
            model=model, optimizer=optimizer, lr_scheduler=kept, extra={"s": scaler, "l": schedule}
        )
        return model, state, kept

    CheckpointManager(tmp_path, build(0, fits=False)[1]).save(mode="sync")
    _, state, kept = build(1, fits=True)
    assert state.model is not None
    before = live_bits(state.model, state.optimizer), kept.state_dict()
    with pytest.raises(CheckpointError, match="restoring the state failed"):
        CheckpointManager(tmp_path, state).restore()
    assert (live_bits(state.model, state.optimizer), kept.state_dict()) == before
