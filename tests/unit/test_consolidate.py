"""A checkpoint becomes Hugging Face files: complete, bit-equal, the same every time, or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from fsdp_ckpt import CorruptCheckpointError, NotFoundError, UnencodableStateError
from fsdp_ckpt.hf import consolidate
from fsdp_ckpt.hf.copying import CopyOptions
from tests.weights import DAMAGES, INDEX, Kinds, assert_equal, contents, load, save


@pytest.fixture
def model() -> Kinds:
    torch.manual_seed(0)
    return Kinds()


@pytest.fixture
def root(tmp_path: Path, model: Kinds) -> Path:
    save(tmp_path / "run", model)
    return tmp_path / "run"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


# --- what comes out ---


def test_every_tensor_comes_out_once_in_one_file(root: Path, out: Path, model: Kinds) -> None:
    """Any dtype, 0-d, without elements, not contiguous, tied: bit-equal, without an index."""
    report = consolidate(root, out)
    assert sorted(contents(out)) == ["model.safetensors"]
    assert_equal(load(out), model.tensors())
    expected = sum(t.numel() * t.element_size() for t in model.tensors().values())
    assert (report.step, report.files, report.total_bytes) == (5, ("model.safetensors",), expected)
    assert report.num_tensors == len(model.tensors())
    assert report.left_out == report.varying == report.skipped == ()


@pytest.mark.parametrize("max_shard_bytes", [1, 100, 1000, 3300])
def test_files_keep_to_their_size_and_the_index_names_each(
    root: Path, out: Path, model: Kinds, max_shard_bytes: int
) -> None:
    """A file is at most as large as asked for, unless it holds one tensor; the index covers all."""
    report = consolidate(root, out, max_shard_bytes=max_shard_bytes)
    assert len(report.files) > 1
    assert sorted(contents(out)) == sorted((*report.files, INDEX))
    assert report.files[0] == f"model-00001-of-{len(report.files):05d}.safetensors"
    assert_equal(load(out), model.tensors())
    index = json.loads((out / INDEX).read_text())
    assert index["metadata"] == {"total_size": report.total_bytes}
    assert index["weight_map"].keys() == model.tensors().keys()
    for name in report.files:
        with safe_open(out / name, "pt") as file:
            held = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        assert all(index["weight_map"][key] == name for key in held)
        assert (
            sum(t.numel() * t.element_size() for t in held.values()) <= max_shard_bytes
            or sum(t.numel() > 0 for t in held.values()) == 1
        )


@pytest.mark.parametrize("window_bytes", [1, 4097, 2**30])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_runs_are_byte_identical(
    root: Path, tmp_path: Path, window_bytes: int, num_threads: int
) -> None:
    """Neither a second run nor how much is read at a time changes a byte."""
    first, second = tmp_path / "first", tmp_path / "second"
    consolidate(root, first, max_shard_bytes=2000)
    consolidate(
        root,
        second,
        max_shard_bytes=2000,
        copying=CopyOptions(window_bytes=window_bytes, num_threads=num_threads, buffer_bytes=1),
    )
    assert contents(first) == contents(second)


def test_a_tensor_larger_than_a_window_comes_out_in_many(tmp_path: Path, out: Path) -> None:
    """Windows and source blocks cut tensors anywhere, along any dim, and need not meet."""
    torch.manual_seed(0)
    model = nn.ParameterDict({"wide": torch.randn(2, 3, 700_001), "long": torch.randn(900_001, 3)})
    save(tmp_path / "run", model)
    consolidate(tmp_path / "run", out, copying=CopyOptions(window_bytes=1_000_003))
    assert_equal(load(out), model.state_dict())


def test_values_of_the_model_are_reported(tmp_path: Path, out: Path) -> None:
    """What a module makes up in its state dict and is no tensor is named, not lost in silence."""

    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"scale": 0.5}

        def set_extra_state(self, state: Any) -> None:
            assert state == {"scale": 0.5}

    save(tmp_path / "run", nn.Sequential(Extra(2, 3)))
    report = consolidate(tmp_path / "run", out)
    assert report.left_out == ("0._extra_state.scale",)
    assert sorted(load(out)) == ["0.bias", "0.weight"]


def test_dtypes_that_safetensors_lacks_are_refused_by_name(tmp_path: Path, out: Path) -> None:
    """Nothing is written in another form than a reader would take it for."""
    save(tmp_path / "run", nn.ParameterDict({"wave": torch.zeros(3, dtype=torch.complex128)}))
    with pytest.raises(UnencodableStateError, match=r"wave.*C128"):
        consolidate(tmp_path / "run", out)
    assert not out.exists()


def test_a_checkpoint_without_a_model_is_refused(tmp_path: Path, out: Path) -> None:
    """An empty model is not written."""
    save(tmp_path / "run", None)
    with pytest.raises(NotFoundError, match="no model weights"):
        consolidate(tmp_path / "run", out)
    assert not out.exists()


# --- where from ---


def test_the_newest_whole_checkpoint_is_taken_or_the_named_one(
    root: Path, tmp_path: Path, model: Kinds
) -> None:
    """A root, a root with a step, and a step's folder all name a checkpoint."""
    with torch.no_grad():
        model.scale.fill_(7)
    six = save(root, model, 6)
    seven = save(root, model, 7)
    next(seven.glob("*/rank-*.safetensors")).unlink()
    newest = consolidate(root, tmp_path / "newest")
    assert (newest.step, [s.step for s in newest.skipped]) == (6, [7])
    assert "missing" in newest.skipped[0].reason
    assert consolidate(f"{six}/", tmp_path / "folder").step == 6
    assert contents(tmp_path / "folder") == contents(tmp_path / "newest")
    older = consolidate(root, tmp_path / "older", step=5)
    assert older.step == 5
    assert load(tmp_path / "older")["scale"] == 0.1
    with pytest.raises(NotFoundError, match=r"step 8; newest steps there: 7, 6, 5"):
        consolidate(root, tmp_path / "none", step=8)
    with pytest.raises(NotFoundError, match="no checkpoint here"):
        consolidate(tmp_path / "nowhere", tmp_path / "none")


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_leaves_no_weights_behind(root: Path, out: Path, kind: str) -> None:
    """A damaged source is an error naming step, rank and file, and never output."""
    shard = next(root.glob("*/*/rank-00000*.safetensors"))
    DAMAGES[kind](shard)
    with pytest.raises(CorruptCheckpointError) as caught:
        consolidate(root, out, step=5, max_shard_bytes=500)
    assert (caught.value.step, caught.value.rank) == (5, 0)
    assert shard.name in str(caught.value)
    assert not out.exists() or contents(out) == {}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_leaves_an_older_run_as_it_is(root: Path, out: Path, kind: str) -> None:
    """Overwriting starts when the new files are whole."""
    consolidate(root, out, max_shard_bytes=1000)
    before = contents(out)
    DAMAGES[kind](next(root.glob("*/*/rank-00000*.safetensors")))
    with pytest.raises(CorruptCheckpointError):
        consolidate(root, out, step=5, max_shard_bytes=500, overwrite=True)
    assert contents(out) == before
