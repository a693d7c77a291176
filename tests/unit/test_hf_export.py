"""A live model of one process is written as Hugging Face files, whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import fsspec
import pytest
import torch
from torch import nn

from fsdp_ckpt import AlreadyCommittedError, MismatchError, StorageError, UnencodableStateError
from fsdp_ckpt.hf import ExportOptions, export
from fsdp_ckpt.hf.consolidate import consolidate
from fsdp_ckpt.weights import export as exporting
from tests.bits import live_bits
from tests.weights import INDEX, Kinds, assert_equal, contents, load, save


@pytest.fixture
def model() -> Kinds:
    torch.manual_seed(0)
    return Kinds()


@pytest.mark.parametrize("max_shard_bytes", [500, 5_000_000_000])
def test_it_writes_what_consolidation_would(
    tmp_path: Path, model: Kinds, max_shard_bytes: int
) -> None:
    """The same bytes as a checkpoint of that model consolidated; the model is only read."""
    before = live_bits(model)
    options = ExportOptions(max_shard_bytes=max_shard_bytes)
    report = export(model, tmp_path / "out", options=options)
    assert live_bits(model) == before
    assert_equal(load(tmp_path / "out"), model.tensors())
    assert report.num_tensors == len(model.tensors())
    assert report.total_bytes == sum(t.nbytes for t in model.tensors().values())
    save(tmp_path / "run", model)
    consolidate(tmp_path / "run", tmp_path / "other", max_shard_bytes=max_shard_bytes)
    assert contents(tmp_path / "out") == contents(tmp_path / "other")
    assert (INDEX in contents(tmp_path / "out")) == (len(report.files) > 1)


def test_any_fsspec_url_is_written(tmp_path: Path, model: Kinds) -> None:
    """An object store gets the same files."""
    export(model, tmp_path / "out", options=ExportOptions(max_shard_bytes=500))
    remote = fsspec.filesystem("memory")
    try:
        url = "memory://hf-export-test"
        export(model, url, options=ExportOptions(max_shard_bytes=500))
        found = {
            path.rpartition("/")[2]: remote.cat_file(path)
            for path in remote.find("/hf-export-test")
        }
    finally:
        remote.rm("/hf-export-test", recursive=True)
    assert found == contents(tmp_path / "out")


def test_windows_may_be_small(
    tmp_path: Path, model: Kinds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors larger than a window are written part by part."""
    export(model, tmp_path / "whole")
    monkeypatch.setattr(exporting, "WINDOW_BYTES", 64)
    export(model, tmp_path / "parts")
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_floating_tensors_change_their_dtype(tmp_path: Path, model: Kinds) -> None:
    """As ``Tensor.to`` rounds; the others stay as they are."""
    export(model, tmp_path / "out", options=ExportOptions(dtype=torch.bfloat16))
    expected = {
        name: t.detach().to(torch.bfloat16) if t.is_floating_point() else t
        for name, t in model.tensors().items()
    }
    assert_equal(load(tmp_path / "out"), expected)


def test_overflow_is_counted_and_refused(tmp_path: Path) -> None:
    """Unless it is allowed; what was infinite before does not count."""
    model = nn.ParameterDict({"w": torch.tensor([1.0, 1e30, -1e30, float("inf"), float("nan")])})
    half = ExportOptions(dtype=torch.float16)
    with pytest.raises(MismatchError, match=r"2 numbers of 1 tensors .* 2 of them in w"):
        export(model, tmp_path / "out", options=half)
    assert list((tmp_path / "out").iterdir()) == []
    allowed = ExportOptions(dtype=torch.float16, allow_overflow=True)
    report = export(model, tmp_path / "out", options=allowed)
    assert report.overflows == {"w": 2}
    assert_equal(load(tmp_path / "out"), {"w": model["w"].detach().half()})


def test_companions_are_copied(tmp_path: Path, model: Kinds) -> None:
    """Configuration and tokenizer files, not weights."""
    origin = tmp_path / "origin"
    origin.mkdir()
    (origin / "config.json").write_text("{}")
    (origin / INDEX).write_text("{}")
    report = export(model, tmp_path / "out", config_from=origin)
    assert report.companions == ("config.json",)
    assert set(contents(tmp_path / "out")) == {"config.json", "model.safetensors"}


def test_a_folder_with_weights_is_refused(tmp_path: Path, model: Kinds) -> None:
    """Unless they are to be replaced."""
    export(model, tmp_path / "out", options=ExportOptions(max_shard_bytes=500))
    before = contents(tmp_path / "out")
    with pytest.raises(AlreadyCommittedError):
        export(model, tmp_path / "out")
    assert contents(tmp_path / "out") == before
    export(model, tmp_path / "out", overwrite=True)
    assert set(contents(tmp_path / "out")) == {"model.safetensors"}


def test_a_store_that_fails_publishes_nothing(
    tmp_path: Path, model: Kinds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is the store's, and no file is left."""

    def fail(self: object, byte_offset: int, data: memoryview) -> None:
        raise StorageError("no space left")

    monkeypatch.setattr("fsdp_ckpt.storage.local_writer.LocalWriter.write_at", fail)
    with pytest.raises(StorageError, match="no space left"):
        export(model, tmp_path / "out")
    assert [p for p in (tmp_path / "out").rglob("*") if p.is_file()] == []


def test_what_is_no_tensor_is_named(tmp_path: Path) -> None:
    """Safetensors holds tensors only; one without memory or a dtype of its own is refused."""

    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"version": 2}

        def set_extra_state(self, state: dict[str, int]) -> None:
            pass

    report = export(Extra(2, 2), tmp_path / "out")
    assert report.left_out == ("_extra_state",)
    with pytest.raises(UnencodableStateError, match="meta"):
        export(nn.Linear(2, 2, device="meta"), tmp_path / "meta")
    complex_model = nn.ParameterDict({"z": torch.ones(2, dtype=torch.complex128)})
    with pytest.raises(UnencodableStateError, match="C128"):
        export(complex_model, tmp_path / "complex")
    assert not (tmp_path / "complex").exists()


@pytest.mark.parametrize("wrong", ["max_shard_bytes", "num_writers", "num_threads"])
def test_options_are_checked(wrong: str) -> None:
    """By name, when they are made."""
    with pytest.raises(ValueError, match=f"{wrong} is 0"):
        ExportOptions(**{wrong: 0})
    with pytest.raises(ValueError, match="floating-point"):
        ExportOptions(dtype=torch.int8)


def test_the_index_names_every_tensor_once(tmp_path: Path, model: Kinds) -> None:
    """And gives the sum of their bytes."""
    report = export(model, tmp_path / "out", options=ExportOptions(max_shard_bytes=500))
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert set(index["weight_map"]) == set(model.tensors())
    assert set(index["weight_map"].values()) == set(report.files)
    assert index["metadata"]["total_size"] == report.total_bytes
