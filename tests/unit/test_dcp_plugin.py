"""Plain ``dcp.save`` and ``dcp.load`` in one process: any state dict, either side's planners, any path."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

from fsdp_ckpt import (
    AlreadyCommittedError,
    CheckpointError,
    CorruptCheckpointError,
    MismatchError,
    NotFoundError,
    ReshardLoadPlanner,
    ShardedStorageReader,
    ShardedStorageWriter,
    ShardSavePlanner,
    StorageError,
    UnencodableStateError,
)
from tests.bits import bits

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(state: dict[Any, Any], path: Any, planner: Any = None) -> None:
    dcp.save(
        state, storage_writer=ShardedStorageWriter(path), planner=planner or ShardSavePlanner()
    )


def load(state: dict[Any, Any], path: Any, planner: Any = None) -> None:
    dcp.load(
        state, storage_reader=ShardedStorageReader(path), planner=planner or ReshardLoadPlanner()
    )


@contextmanager
def refused(error: type[CheckpointError]) -> Iterator[list[CheckpointError]]:
    """DCP raises its own exception, derived from BaseException, around ours."""
    caught: list[CheckpointError] = []
    with pytest.raises(CheckpointException) as info:
        yield caught
    ((found, _),) = info.value.failures.values()
    assert isinstance(found, error)
    assert "\n" not in str(found)
    caught.append(found)


class Metric:
    """A Stateful of plain data and a tensor."""

    def __init__(self, seed: int) -> None:
        self.values = {"count": seed, "sums": torch.full((2,), float(seed)), "history": [seed]}

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


def build(seed: int) -> dict[str, Any]:
    """A state dict of all kinds that DCP's own planners know, different for each seed."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    return {
        "model": model.state_dict(),
        "nested": {"deep": {"er": {"x": torch.rand(2, 3)}}, "y": torch.rand(())},
        "list": [torch.rand(2), torch.rand(3)],
        "empty": torch.empty(0, 3),
        "strided": torch.rand(6, 8)[::2, 1::3],
        "transposed": torch.rand(4, 5).t(),
        "expanded": torch.rand(3, 1).expand(3, 2).clone()
        if seed
        else torch.rand(3, 1).expand(3, 2),
        "bf16": torch.rand(7).bfloat16(),
        "mask": torch.rand(5) > 0.5,
        "step": seed,
        "lr": 0.1 + seed,
        "name": f"run {seed}",
        "values": {"tuple": (seed, (None, "a")), "bytes": bytes([seed, 255])},
        "metric": Metric(seed),
    }


def plain(state: dict[str, Any]) -> Any:
    return bits({k: v.state_dict() if isinstance(v, Metric) else v for k, v in state.items()})


PLANNERS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "ours": (ShardSavePlanner, ReshardLoadPlanner),
    "DCP's to save": (DefaultSavePlanner, ReshardLoadPlanner),
    "DCP's to load": (ShardSavePlanner, DefaultLoadPlanner),
    "DCP's": (DefaultSavePlanner, DefaultLoadPlanner),
}


@pytest.mark.parametrize("planners", PLANNERS)
def test_a_state_dict_comes_back_to_the_bit(tmp_path: Path, planners: str) -> None:
    """Tensors arrive in the live memory, strided as it is; values in the dicts; Statefuls load theirs."""
    save_planner, load_planner = PLANNERS[planners]
    saved, live = build(0), build(1)
    expected = plain(saved)
    tensors = {k: v for k, v in live.items() if isinstance(v, torch.Tensor)}
    tensors |= {"list": live["list"][0], "deep": live["nested"]["y"]}
    strides = {k: (t.data_ptr(), t.stride()) for k, t in tensors.items()}
    save(saved, tmp_path / "c", save_planner())
    assert plain(saved) == expected
    load(live, tmp_path / "c", load_planner())
    assert plain(live) == expected
    assert strides == {k: (t.data_ptr(), t.stride()) for k, t in tensors.items()}
    for key in ("strided", "transposed", "bf16"):
        assert live[key] is tensors[key]


@pytest.mark.parametrize("planners", PLANNERS)
def test_modules_and_optimizers_are_statefuls(tmp_path: Path, planners: str) -> None:
    """Given as they are, with an optimizer's int keys, groups and step counts."""
    save_planner, load_planner = PLANNERS[planners]
    lives = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + seed)
        for _ in range(2 - seed):
            model(torch.rand(4, 3)).sum().backward()
            optimizer.step()
        lives.append({"model": model, "optimizer": optimizer, "values": {"a": {"b": seed}}})
    save(lives[0], tmp_path / "c", save_planner())
    load(lives[1], tmp_path / "c", load_planner())
    parts = [(live["model"].state_dict(), live["optimizer"].state_dict()) for live in lives]
    assert bits(parts[0]) == bits(parts[1])
    assert lives[1]["values"] == {"a": {"b": 0}}


def test_what_dcp_cannot_keep_is_kept(tmp_path: Path) -> None:
    """Int keys, values beside tensors in lists and tuples, and collections keep their types."""
    saved = {
        "by int": {1: torch.rand(2), 2: {3: "three", "x": torch.rand(1)}},
        "mixed": [torch.rand(2), 1, ("a", torch.rand(1), {"b": 2.5}), [], {}],
        "tensors": (torch.rand(2), [torch.rand(1).t()]),
        "counter": collections.Counter("aab"),
        "tuple": (1, torch.rand(1), None),
        "empty": {"a": {}, "b": []},
    }
    live = {
        "by int": {1: torch.zeros(2), 2: {3: "", "x": torch.zeros(1)}},
        "mixed": [torch.zeros(2), 0, ("", torch.zeros(1), {"b": 0}), None, None],
        "tensors": (torch.zeros(2), [torch.zeros(1)]),
        "counter": None,
        "tuple": (0, torch.zeros(1), 0),
        "empty": {"a": {}, "b": None},
    }
    inside = live["tensors"][0], live["mixed"][2][1]
    save(saved, tmp_path / "c")
    load(live, tmp_path / "c")
    assert bits(live) == bits(saved)
    assert live["tensors"][0] is inside[0]
    assert live["mixed"][2][1] is inside[1]


def test_dcps_planner_without_flattening_works_for_flat_dicts(tmp_path: Path) -> None:
    """Tensors and plain values at the top; what it would pickle is refused by key, and nothing stays."""
    saved, live = {"x": torch.rand(2), "v": (1, "a")}, {"x": torch.zeros(2), "v": None}
    save(saved, tmp_path / "c", DefaultSavePlanner(flatten_state_dict=False))
    load(live, tmp_path / "c", DefaultLoadPlanner(flatten_state_dict=False))
    assert bits(live) == bits(saved)
    for state, key, flatten in (
        ({"d": {"t": torch.rand(1)}}, "d.t", False),
        ({"d": {"t": (torch.rand(1),)}}, "d.t[0]", True),
    ):
        with refused(UnencodableStateError) as caught:
            save(state, tmp_path / "d", DefaultSavePlanner(flatten_state_dict=flatten))
        assert caught[0].key == key
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


class Remote:
    """A ``PathLike`` that is not a ``pathlib.Path``."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __fspath__(self) -> str:
        return str(self._path)


@pytest.mark.parametrize("kind", ["str", "Path", "PathLike", "relative", "file://", "memory://"])
def test_a_checkpoint_may_be_named_in_any_way(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A str, a PathLike, a relative path or a URL: the same checkpoint."""
    monkeypatch.chdir(tmp_path)
    target: Any = {
        "str": str(tmp_path / "c"),
        "Path": tmp_path / "c",
        "PathLike": Remote(tmp_path / "c"),
        "relative": "c",
        "file://": f"file://{tmp_path}/c",
        "memory://": f"memory://{tmp_path.name}/c",
    }[kind]
    saved, live = build(0), build(1)
    assert ShardedStorageWriter.validate_checkpoint_id(target)
    assert ShardedStorageReader.validate_checkpoint_id(target)
    save(saved, target)
    load(live, target)
    assert plain(live) == plain(saved)
    assert (tmp_path / "c" / "manifest.json").exists() is (kind != "memory://")
    if kind != "memory://":
        again = build(2)
        load(again, tmp_path / "c")
        assert plain(again) == plain(saved)


def test_checkpoint_id_is_where_it_goes(tmp_path: Path) -> None:
    """DCP's own argument wins over the path that writer and reader were made with."""
    saved, live = {"x": torch.rand(3)}, {"x": torch.zeros(3)}
    writer, reader = ShardedStorageWriter(tmp_path / "a"), ShardedStorageReader(tmp_path / "a")
    for name in ("b", "c"):
        dcp.save(
            saved,
            checkpoint_id=os.fspath(tmp_path / name),
            storage_writer=writer,
            planner=ShardSavePlanner(),
        )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b", "c"]
    dcp.load(
        live, checkpoint_id=tmp_path / "c", storage_reader=reader, planner=ReshardLoadPlanner()
    )
    assert bits(live) == bits(saved)


@pytest.mark.parametrize("planners", PLANNERS)
def test_a_part_can_be_loaded(tmp_path: Path, planners: str) -> None:
    """A state dict with fewer keys gets what it asks for; so does a smaller nested one."""
    save_planner, load_planner = PLANNERS[planners]
    saved = build(0)
    save(saved, tmp_path / "c", save_planner())
    live = {"nested": {"y": torch.zeros(())}, "step": -1, "list": [torch.zeros(2)]}
    load(live, tmp_path / "c", load_planner())
    expected = {"nested": {"y": saved["nested"]["y"]}, "step": 0, "list": saved["list"][:1]}
    assert bits(live) == bits(expected)


def test_differences_come_in_one_error_and_change_nothing(tmp_path: Path) -> None:
    """Another dtype, another shape, a missing key, a value for a tensor: all named, nothing loaded."""
    save({"a": torch.rand(2), "b": torch.rand(3), "d": 1, "e": torch.rand(1)}, tmp_path / "c")
    live = {
        "a": torch.zeros(2, dtype=torch.float64),
        "b": torch.zeros(4),
        "c": torch.zeros(1),
        "d": torch.zeros(1),
        "e": torch.zeros(1),
    }
    before = bits(live)
    with refused(MismatchError) as caught:
        load(live, tmp_path / "c")
    for words in (
        "a: dtype F32 in the checkpoint, F64 here",
        "b: shape [3] in the checkpoint, [4] here",
        "c: missing in the checkpoint",
        "d: a value in the checkpoint, a tensor here",
    ):
        assert words in str(caught[0])
    assert bits(live) == before


def test_the_planners_doors(tmp_path: Path) -> None:
    """Cast, missing and unexpected names are allowed one by one, and told afterwards."""
    saved = {"a": torch.rand(2), "more": torch.rand(1)}
    save(saved, tmp_path / "c")
    live = {"a": torch.zeros(2, dtype=torch.bfloat16), "new": torch.zeros(1)}
    planner = ReshardLoadPlanner(allow_cast=True, allow_missing=["n*"], allow_unexpected=["mo??"])
    load(live, tmp_path / "c", planner)
    assert bits(live) == bits({"a": saved["a"].bfloat16(), "new": torch.zeros(1)})
    assert planner.differences.missing == ["new"]
    assert planner.differences.unexpected == ["more"]
    assert planner.differences.cast == {"a": ("F32", "BF16")}
    with refused(MismatchError) as caught:
        load({"a": torch.zeros(2)}, tmp_path / "c", ReshardLoadPlanner(allow_unexpected=()))
    assert "more: in the checkpoint, not here" in str(caught[0])


@pytest.mark.parametrize("planner", [ShardSavePlanner, DefaultSavePlanner])
@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_checkpoint_is_never_overwritten(tmp_path: Path, planner: Any, kind: str) -> None:
    """A second save under the same path is refused, and the first one stays whole."""
    target = tmp_path / "c" if kind == "local" else f"memory://{tmp_path.name}/{planner.__name__}"
    saved, live = {"x": torch.rand(3)}, {"x": torch.zeros(3)}
    save(saved, target, planner())
    with refused(AlreadyCommittedError):
        save({"x": torch.rand(3)}, target, planner())
    load(live, target)
    assert bits(live) == bits(saved)


@pytest.mark.parametrize("planner", [ShardSavePlanner, DefaultSavePlanner])
def test_what_cannot_be_encoded_is_refused_by_key(tmp_path: Path, planner: Any) -> None:
    """Neither file nor folder is made for it."""
    with refused(UnencodableStateError) as caught:
        save({"a": {"x": torch.rand(1), "f": object()}}, tmp_path / "c", planner())
    assert caught[0].key == "a.f"
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_or_absent_checkpoint_is_told(tmp_path: Path) -> None:
    """Absent, and changed by a bit: the live state is untouched."""
    live = {"x": torch.rand(3), "y": torch.rand(2000)}
    # DCP turns what read_metadata() raises into an AssertionError with the same words.
    with pytest.raises(CheckpointException, match=rf"{tmp_path}/c: no checkpoint here"):
        load(live, tmp_path / "c")
    with pytest.raises(NotFoundError):
        ShardedStorageReader(tmp_path / "c").read_metadata()
    save(live, tmp_path / "c")
    (shard,) = tmp_path.rglob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    before = bits(live)
    with refused(CorruptCheckpointError) as caught:
        load(live, tmp_path / "c")
    assert caught[0].rank == 0
    assert shard.name in str(caught[0])
    assert bits(live) == before


def test_collectives_cannot_be_left_out(tmp_path: Path) -> None:
    """Without all ranks' receipts nothing can be sealed: asked for, it is refused."""
    with pytest.raises(StorageError, match="use_collectives"):
        ShardedStorageWriter(tmp_path).set_up_storage_writer(True, use_collectives=False)


def test_a_foreign_checkpoint_is_refused_by_our_planner(tmp_path: Path) -> None:
    """DCP's own files are not ours to plan."""
    dcp.save({"x": torch.rand(1)}, checkpoint_id=tmp_path)
    with refused(MismatchError):
        dcp.load({"x": torch.zeros(1)}, checkpoint_id=tmp_path, planner=ReshardLoadPlanner())
