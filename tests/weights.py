"""Models to consolidate, and what a reader of safetensors finds in the output."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from fsdp_ckpt import CheckpointManager, TrainState
from tests.bits import bits

INDEX = "model.safetensors.index.json"
NARROW = {"eighth": torch.float8_e4m3fn, "half_precise": torch.float16}


class Kinds(nn.Module):
    """Every kind of tensor that a model holds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.linear = nn.Linear(16, 9, dtype=torch.bfloat16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(0.1, dtype=torch.float64))
        self.view = nn.Parameter(torch.arange(12.0).reshape(3, 4).t())
        self.row = nn.Parameter(torch.arange(30.0).reshape(3, 10)[1:2])
        self.register_buffer("empty", torch.zeros(0, 4))
        self.register_buffer("seen", torch.tensor(2**60))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        for name, dtype in NARROW.items():
            # Not linspace: transformers, once it has loaded a model, keeps that one off the meta device.
            self.register_buffer(name, (torch.arange(-3.0, 4.0) / 3).to(dtype))
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def tensors(self) -> dict[str, torch.Tensor]:
        """What is to come out: each tensor once."""
        state = self.state_dict()
        del state["head.weight"]
        return state


def save(root: Path, model: nn.Module | None, step: int = 5) -> Path:
    """Save one checkpoint; return its folder."""
    state = TrainState(model=model)
    state.progress.step = step
    with CheckpointManager(root, state) as manager:
        return Path(manager.save(mode="sync").wait().url)


def load(out: Path) -> dict[str, torch.Tensor]:
    """Read every weight file as a safetensors reader does."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(out.glob("model*.safetensors")):
        assert (8 + int.from_bytes(path.read_bytes()[:8], "little")) % 64 == 0
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            for name in file.keys():  # noqa: SIM118 - not a dict
                assert name not in found
                found[name] = file.get_tensor(name)
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert {n: bits(t) for n, t in found.items()} == {n: bits(t) for n, t in expected.items()}


def flip_byte(path: Path, *, of_header: int = 0, of_data: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data_offset = 8 + int.from_bytes(data[:8], "little")
    data[of_header or data_offset + of_data] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "missing": Path.unlink,
    "short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "header": lambda path: flip_byte(path, of_header=20),
    "data": lambda path: flip_byte(path, of_data=3000),
}
