"""Nothing that is written is a pickle, and nothing that is read is unpickled."""

from __future__ import annotations

import base64
import binascii
import json
import pickle
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import load as load_safetensors
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

from fsdp_ckpt import (
    CheckpointManager,
    ReshardLoadPlanner,
    ResumableSampler,
    ShardedStorageReader,
    ShardedStorageWriter,
    ShardSavePlanner,
    TrainState,
)
from tests.bits import bits, live_bits

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

PACKAGE = Path(__file__).parents[2] / "fsdp_ckpt"
_armed: list[bool] = []


def _refuse_find_class(event: str, args: tuple[Any, ...]) -> None:
    """The event that every ``Unpickler.find_class`` raises, the one in C too."""
    if _armed and event == "pickle.find_class":
        raise AssertionError(f"unpickled {args}")


sys.addaudithook(_refuse_find_class)  # for good: hooks cannot be removed


@pytest.fixture
def no_pickle(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pickling, unpickling and torch's files fail."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("pickled or unpickled")

    for name in ("dump", "dumps", "load", "loads"):
        monkeypatch.setattr(pickle, name, refuse)
    for name in (
        "Pickler",
        "Unpickler",
        "_Pickler",
        "_Unpickler",
    ):  # classes: torch derives from them
        refusing = type(name, (getattr(pickle, name),), {"__init__": refuse, "find_class": refuse})
        monkeypatch.setattr(pickle, name, refusing)
    for module in (torch, torch.serialization):
        monkeypatch.setattr(module, "save", refuse)
        monkeypatch.setattr(module, "load", refuse)
    _armed.append(True)
    yield
    _armed.clear()


def test_the_guard_would_see_it(
    tmp_path: Path, no_pickle: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DCP's own files fail under it; so does a pickle that is read by the C unpickler."""
    with pytest.raises(CheckpointException, match="pickled or unpickled"):
        dcp.save({"x": torch.rand(1)}, checkpoint_id=tmp_path)
    monkeypatch.undo()
    with pytest.raises(AssertionError, match="unpickled"):
        pickle.loads(pickle.dumps(Path()))


class Value:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.value = state


def whole_job(root: Path, seed: int) -> tuple[CheckpointManager, Callable[[], Any]]:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    extra = {
        "ema": nn.Linear(2, 2),
        "scaler": torch.amp.GradScaler("cpu"),
        "values": Value(
            {1: (np.float32(seed), {torch.float32}), "b": b"\xff", "t": [torch.rand(2)]}
        ),
    }
    sampler = ResumableSampler(20)
    state = TrainState(
        model=model,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        data=sampler,
        extra=extra,
        generators={"g": np.random.default_rng(seed), "t": torch.Generator().manual_seed(seed)},
    )
    for _ in range(3 - seed):
        model(torch.rand(4, 3)).square().sum().backward()
        optimizer.step()
        scheduler.step()
        state.progress.advance(samples=4)

    def look() -> Any:
        return live_bits(
            model, optimizer, scheduler=scheduler, data=sampler, progress=state.progress, **extra
        )

    return CheckpointManager(root, state), look


def test_a_whole_save_and_restore_pickles_nothing(tmp_path: Path, no_pickle: None) -> None:
    """The full training state goes out and comes back."""
    saver, saved = whole_job(tmp_path, 0)
    saver.save(mode="sync")
    expected = saved()
    loader, loaded = whole_job(tmp_path, 1)
    assert loader.restore().step == 3
    assert loaded() == expected
    assert_only_safetensors_and_json(tmp_path)


def dcp_state(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    values = {
        "s": {seed, "a"},
        "n": np.arange(seed + 3),
        "f": float("nan"),
        "o": (None, b"\x80\x04"),
    }
    return {"model": nn.Linear(3, 2), "x": [torch.rand(2)], "values": values}


@pytest.mark.parametrize("load_planner", [ReshardLoadPlanner, DefaultLoadPlanner])
@pytest.mark.parametrize("save_planner", [ShardSavePlanner, DefaultSavePlanner])
def test_plain_dcp_pickles_nothing(
    tmp_path: Path, no_pickle: None, save_planner: Any, load_planner: Any
) -> None:
    """``dcp.save`` and ``dcp.load`` with our storage, with our planners and with DCP's."""
    saved, live = dcp_state(0), dcp_state(1)
    dcp.save(saved, storage_writer=ShardedStorageWriter(tmp_path), planner=save_planner())
    dcp.load(live, storage_reader=ShardedStorageReader(tmp_path), planner=load_planner())

    def plain(state: dict[str, Any]) -> Any:
        return bits(
            {k: v.state_dict() if hasattr(v, "state_dict") else v for k, v in state.items()}
        )

    assert plain(live) == plain(saved)
    assert_only_safetensors_and_json(tmp_path, but=b"\x80\x04")


def assert_only_safetensors_and_json(root: Path, but: bytes = b"") -> None:
    """Every file is one of the two, and none holds a pickle: not as text, not as a tensor's bytes.

    Args:
        root: Folder to look through.
        but: A value of the test's own that looks like one.
    """
    files = [path for path in root.rglob("*") if path.is_file()]
    assert sorted({path.suffix for path in files}) == [".json", ".safetensors"]
    for path in files:
        content = path.read_bytes()
        assert not looks_like_pickle(content)
        if path.suffix == ".json":
            documents = [json.loads(content)]
        else:
            size = int.from_bytes(content[:8], "little")
            header = json.loads(content[8 : 8 + size])
            documents = [header, json.loads(header["__metadata__"]["fsdp_ckpt"])]
            for name, array in load_safetensors(content).items():
                assert not looks_like_pickle(array.tobytes()), name
        found = [data for document in documents for data in encoded_bytes(document)]
        assert [data for data in found if looks_like_pickle(data) and data != but] == []


def encoded_bytes(document: Any) -> Iterator[bytes]:
    """Yield what any string in the document could be the base64 of, and the string itself."""
    if isinstance(document, dict):
        for key, value in document.items():
            yield from encoded_bytes(key)
            yield from encoded_bytes(value)
    elif isinstance(document, list):
        for value in document:
            yield from encoded_bytes(value)
    elif isinstance(document, str):
        yield document.encode()
        try:
            yield base64.b64decode(document, validate=True)
        except (binascii.Error, ValueError):
            return


def looks_like_pickle(data: bytes) -> bool:
    """Whether data starts as pickles of protocol 2 and later do, or as torch's zip archives."""
    is_pickle = len(data) > 1 and data[0] == 0x80 and 2 <= data[1] <= pickle.HIGHEST_PROTOCOL
    return is_pickle or data.startswith(b"PK\x03\x04")


def test_one_file_reads_pickles() -> None:
    """DeepSpeed's, by a table of names; and the ranks of tests, what they wrote themselves."""
    files = [
        p
        for p in PACKAGE.rglob("*.py")
        if re.search(r"^\s*(import|from) pickle", p.read_text(), re.M)
    ]
    found = {p.relative_to(PACKAGE).as_posix() for p in files}
    assert found == {"deepspeed/unpickler.py", "testing/ranks.py"}


def test_the_scan_would_see_it(tmp_path: Path) -> None:
    """A pickle or an archive of torch's in any file, name or value is found."""
    hidden = base64.b64encode(pickle.dumps([1])).decode()
    torch.save(torch.rand(1), tmp_path / "torch")
    assert looks_like_pickle(pickle.dumps(1))
    assert looks_like_pickle((tmp_path / "torch").read_bytes())
    assert any(looks_like_pickle(data) for data in encoded_bytes({"a": [{"v": hidden}]}))
