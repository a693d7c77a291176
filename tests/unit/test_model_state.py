"""Every tensor of a model, and what its modules make up, comes back to the bit; a tied one stays one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from fsdp_ckpt import CheckpointManager, MismatchError, TrainState
from tests.bits import bits, live_bits

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
    CheckpointManager(tmp_path, TrainState(model=saved)).save(mode="sync")
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
    saved, fresh = nn.Linear(1, 1), nn.Linear(1, 1)
    for model in (saved, fresh):
        model.register_buffer("derived", torch.rand(3), persistent=False)
        model.register_buffer("kept", torch.rand(3))
    CheckpointManager(tmp_path, TrainState(model=saved)).save(mode="sync")
    derived = bits(fresh.derived)
    CheckpointManager(tmp_path, TrainState(model=fresh)).restore()
    assert bits(fresh.derived) == derived
    assert bits(fresh.kept) == bits(saved.kept)
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
    CheckpointManager(tmp_path, TrainState(model=saved)).save(mode="sync")
    report = CheckpointManager(tmp_path, TrainState(model=fresh)).restore()
    assert (report.missing, report.unexpected) == ((), ())
    assert bits(fresh[1].memory) == bits(memory)
    assert bits(fresh[1].weight) == bits(saved[1].weight)


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
    CheckpointManager(tmp_path, saved).save(mode="sync")
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
    CheckpointManager(tmp_path, saved).save(mode="sync")
    CheckpointManager(tmp_path, fresh).restore()
    assert bits(fresh.model.embed.weight) == bits(saved.model.embed.weight)
    (expected,), (found,) = saved.optimizer.state.values(), fresh.optimizer.state.values()
    assert bits(found) == bits(expected)


def test_a_tied_parameter_loads_into_two(tmp_path: Path) -> None:
    """Untied names both get the value; that one of them has no moments must be allowed."""
    saved = tied_state(True, steps=1)
    CheckpointManager(tmp_path, saved).save(mode="sync")
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
    CheckpointManager(tmp_path, tied_state(False)).save(mode="sync")
    fresh = tied_state(True)
    before = live_bits(fresh.model, fresh.optimizer)
    with pytest.raises(MismatchError, match=r"embed.weight and head.weight are one tensor here, 2"):
        CheckpointManager(tmp_path, fresh).restore()
    assert live_bits(fresh.model, fresh.optimizer) == before


def test_untied_names_of_another_shape_are_refused(tmp_path: Path) -> None:
    """A tied value is not copied into a tensor that it does not fit."""
    CheckpointManager(tmp_path, TrainState(model=Tied(True))).save(mode="sync")
    fresh = Tied(False)
    fresh.head = nn.Linear(3, 4, bias=False)
    before = live_bits(fresh)
    with pytest.raises(MismatchError, match=r"model\.head\.weight"):
        CheckpointManager(tmp_path, TrainState(model=fresh)).restore()
    assert live_bits(fresh) == before
