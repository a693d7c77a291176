"""Hugging Face files load into a live model of one process, whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fsdp_ckpt import CorruptCheckpointError, MismatchError, NotFoundError
from fsdp_ckpt.hf import load
from fsdp_ckpt.hf.model_files import open_model_files
from fsdp_ckpt.plan.box import Box
from fsdp_ckpt.plan.ranges import box_ranges
from fsdp_ckpt.storage.local import LocalStore
from fsdp_ckpt.storage.open import open_store
from tests.bits import live_bits
from tests.hf_files import different_kinds, write_files
from tests.weights import INDEX, Kinds, assert_equal, contents


@pytest.mark.parametrize("num_files", [1, 3])
def test_every_kind_of_tensor_comes_back(tmp_path: Path, num_files: int) -> None:
    """Every dtype and shape, tied weights too, to the bit; the source stays as it is."""
    torch.manual_seed(0)
    saved, model = Kinds(), different_kinds()
    source = write_files(tmp_path / "hf", saved.tensors(), num_files)
    before = contents(source)
    report = load(model, source)
    assert_equal(model.state_dict(), saved.state_dict())
    assert model.head.weight is model.embedding.weight
    assert (report.missing, report.unexpected, report.cast) == ((), (), {})
    assert report.read_bytes == sum(t.nbytes for t in saved.tensors().values())
    assert len(report.files) == num_files
    assert contents(source) == before


def test_any_fsspec_url_is_read(tmp_path: Path) -> None:
    """A model on a remote store loads alike."""
    torch.manual_seed(0)
    saved, model = Kinds(), different_kinds()
    source = write_files(tmp_path / "hf", saved.tensors(), 2)
    remote = fsspec.filesystem("memory")
    try:
        for name, content in contents(source).items():
            remote.pipe_file(f"/hf-load-test/{name}", content)
        load(model, "memory://hf-load-test")
    finally:
        remote.rm("/hf-load-test", recursive=True)
    assert_equal(model.state_dict(), saved.state_dict())


def test_links_of_a_cache_are_followed(tmp_path: Path) -> None:
    """Hugging Face's cache is a folder of links to blobs elsewhere."""
    torch.manual_seed(0)
    saved, model = Kinds(), different_kinds()
    blobs = write_files(tmp_path / "blobs", saved.tensors(), 2)
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    load(model, snapshot)
    assert_equal(model.state_dict(), saved.state_dict())


def test_all_differences_are_one_error_and_nothing_changes(tmp_path: Path) -> None:
    """Missing and unexpected names, shapes and dtypes, each with what is expected and found."""
    tensors = nn.Linear(3, 4).state_dict()
    tensors["weight"] = tensors["weight"].half()
    tensors["bias"] = tensors["bias"][:2]
    tensors["extra"] = torch.ones(1)
    source = write_files(tmp_path / "hf", tensors)
    model = nn.Linear(3, 4)
    model.register_buffer("absent", torch.ones(2))
    before = live_bits(model)
    with pytest.raises(MismatchError) as caught:
        load(model, source)
    message = str(caught.value)
    for part in (
        str(source),
        "4 differences",
        "weight: dtype F16 in the checkpoint, F32 here",
        "bias: shape [2] in the checkpoint, [4] here",
        "absent: missing in the checkpoint",
        "extra: in the checkpoint, not here",
    ):
        assert part in message
    assert "\n" not in message
    assert live_bits(model) == before


def test_differences_may_be_allowed(tmp_path: Path) -> None:
    """By pattern; a cast rounds as ``copy_`` does, and the report says what was passed over."""
    source = write_files(
        tmp_path / "hf", {"weight": torch.rand(4, 3, dtype=torch.float64), "x.y": torch.ones(1)}
    )
    model = nn.Linear(3, 4)
    bias = model.bias.detach().clone()
    report = load(model, source, allow_missing=["bias"], allow_unexpected=["x.*"], allow_cast=True)
    whole = torch.zeros(4, 3)
    with torch.no_grad():
        whole.copy_(load_file(source / "model.safetensors")["weight"])
    assert torch.equal(model.weight, whole)
    assert torch.equal(model.bias, bias)
    assert (report.missing, report.unexpected) == (("bias",), ("x.y",))
    assert report.cast == {"weight": ("F64", "F32")}


def test_of_tied_weights_any_name_will_do(tmp_path: Path) -> None:
    """Either, or both where they are equal; two different tensors for one are refused."""
    saved = Kinds()
    tensors = saved.tensors()
    renamed = {"head.weight" if n == "embedding.weight" else n: t for n, t in tensors.items()}
    both = {**tensors, "head.weight": tensors["embedding.weight"].clone()}
    for name, found in (("renamed", renamed), ("both", both)):
        model = different_kinds()
        load(model, write_files(tmp_path / name, found))
        assert_equal(model.state_dict(), saved.state_dict())
        assert model.head.weight is model.embedding.weight
    both["head.weight"][0, 0] += 1
    model = different_kinds()
    before = live_bits(model)
    with pytest.raises(MismatchError, match=r"embedding\.weight and head\.weight are one tensor"):
        load(model, write_files(tmp_path / "differing", both))
    assert live_bits(model) == before


def test_a_meta_model_gets_memory(tmp_path: Path) -> None:
    """Parameters and buffers, tied ones as one; what no file holds is named, never left to chance."""
    torch.manual_seed(0)
    saved = Kinds()
    source = write_files(tmp_path / "hf", saved.tensors())
    with torch.device("meta"):
        model = Kinds()
    with pytest.raises(MismatchError, match="passing: missing"):
        load(model, source)
    assert all(t.is_meta for t in model.state_dict().values())
    report = load(model, source, allow_missing=["passing"])
    assert report.missing == ("passing",)
    assert_equal(model.state_dict(), saved.state_dict())
    assert model.head.weight is model.embedding.weight
    assert not model.passing.is_meta
    model.head(model.embedding(torch.tensor([1]))).sum().backward()


def damage(source: Path, kind: str) -> None:
    path = sorted(source.glob("*.safetensors"))[-1]
    data = path.read_bytes()
    index = json.loads((source / INDEX).read_text())
    match kind:
        case "short":
            path.write_bytes(data[:-1])
        case "long":
            path.write_bytes(data + b"x")
        case "empty":
            path.write_bytes(b"")
        case "header":
            path.write_bytes(data[:8] + b"x" + data[9:])
        case "dims":
            header = {"w": {"dtype": "U8", "shape": [1] * 64, "data_offsets": [0, 1]}}
            text = json.dumps(header).encode()
            path.write_bytes(len(text).to_bytes(8, "little") + text + b"x")
        case "dtype":
            path.write_bytes(data.replace(b'"F32"', b'"F33"'))
        case "gap":
            start = data.index(b'"data_offsets":[0,') + len(b'"data_offsets":[')
            path.write_bytes(data[:start] + b"1" + data[start + 1 :])
        case "length":
            path.write_bytes(b"\xff" * 8 + data[8:])
        case "index":
            (source / INDEX).write_text("{}")
        case "lies":
            index["weight_map"]["invented"] = path.name
            (source / INDEX).write_text(json.dumps(index))
        case "leaves":
            index["weight_map"]["invented"] = "../x.safetensors"
            (source / INDEX).write_text(json.dumps(index))
        case "missing":
            path.unlink()


@pytest.mark.parametrize(
    "kind",
    [
        "short",
        "long",
        "empty",
        "header",
        "length",
        "dims",
        "dtype",
        "gap",
        "index",
        "lies",
        "leaves",
        "missing",
    ],
)
def test_damaged_files_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    """Never zeros, never a shorter tensor, and nothing has changed."""
    source = write_files(tmp_path / "hf", Kinds().tensors(), 2)
    damage(source, kind)
    model = different_kinds()
    before = live_bits(model)
    error = NotFoundError if kind == "missing" else CorruptCheckpointError
    with pytest.raises(error) as caught:
        load(model, source)
    assert "model-00002" in str(caught.value) or INDEX in str(caught.value)
    assert "\n" not in str(caught.value)
    assert live_bits(model) == before


def test_a_folder_without_weights_says_what_is_read(tmp_path: Path) -> None:
    """A pickle is never read."""
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(NotFoundError, match="never read"):
        load(nn.Linear(1, 1), tmp_path)


def test_the_index_decides_where_a_tensor_is(tmp_path: Path) -> None:
    """A stale copy in another file is left alone."""
    linear = nn.Linear(3, 4)
    source = write_files(tmp_path / "hf", linear.state_dict(), 2)
    save_file(
        {"bias": linear.bias.detach(), "weight": torch.zeros(4, 3)},
        source / "model-00002-of-00002.safetensors",
    )
    model = nn.Linear(3, 4)
    load(model, source)
    assert_equal(model.state_dict(), linear.state_dict())


class CountingStore(LocalStore):
    """Counts the bytes that are read."""

    gap_bytes = 1000
    num_bytes = 0

    def read_into(self, key: str, byte_offset: int, buffer: memoryview) -> None:
        self.num_bytes += len(buffer)
        super().read_into(key, byte_offset, buffer)


def test_only_the_ranges_asked_for_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of a large tensor costs its own bytes, in as few requests as its shape allows."""
    counter = CountingStore(
        str(write_files(tmp_path / "hf", {"w": torch.arange(4e4).view(200, 200)}))
    )
    monkeypatch.setattr("fsdp_ckpt.hf.model_files.locate_file", lambda store, name: (counter, name))
    files = open_model_files(counter)
    for box, num_bytes in (
        (Box((50, 0), (10, 200)), 8000),
        (Box((50, 0), (10, 100)), 7600),  # gaps of 400 bytes are read through
    ):
        before = counter.num_bytes
        (piece,) = files.pieces("w", box)
        found = files.read([piece]).array(piece).view("<f4")[..., 0]
        assert counter.num_bytes - before == num_bytes
        assert found.tolist() == (torch.arange(4e4).view(200, 200)[50:60, : box.sizes[1]].tolist())


def test_ranges_of_a_box_cover_it_exactly() -> None:
    """Without gaps read through, the ranges are the box's bytes, each once, for any box."""
    shape = (3, 4, 5)
    numbers = torch.arange(60).view(shape)
    for offsets, sizes in (
        ((0, 0, 0), shape),
        ((1, 0, 0), (1, 4, 5)),
        ((0, 1, 0), (3, 2, 5)),
        ((0, 1, 2), (3, 2, 3)),
        ((2, 3, 4), (1, 1, 1)),
        ((0, 3, 4), (3, 1, 1)),
    ):
        found = [
            number
            for start, stop in box_ranges(Box(offsets, sizes), Box.whole(shape), 1, 0)
            for number in range(start, stop)
        ]
        slices = tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))
        assert found == numbers[slices].flatten().tolist()
        (span,) = box_ranges(Box(offsets, sizes), Box.whole(shape), 1, 60)
        assert span == (found[0], found[-1] + 1)
    assert list(box_ranges(Box((), ()), Box.whole(()), 8, 0)) == [(0, 8)]


def test_headers_travel_as_plain_data(tmp_path: Path) -> None:
    """What one rank has read, the others rebuild."""
    from fsdp_ckpt.hf.model_files import ModelFile

    source = write_files(tmp_path / "hf", Kinds().tensors(), 2)
    found = open_model_files(open_store(source))
    encoded: Any = json.loads(json.dumps([file.to_json() for file in found.files]))
    assert tuple(ModelFile.from_json(file) for file in encoded) == found.files
