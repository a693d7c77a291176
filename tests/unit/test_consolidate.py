"""A checkpoint becomes Hugging Face files: complete, bit-equal, the same every time, or not at all."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from torch import nn

from fsdp_ckpt import (
    AlreadyCommittedError,
    CheckpointManager,
    CorruptCheckpointError,
    NotFoundError,
    TrainState,
    UnencodableStateError,
)
from fsdp_ckpt.hf import consolidate
from fsdp_ckpt.hf.layout import index_of, lay_out_files
from fsdp_ckpt.manifest.schema import TensorRow
from fsdp_ckpt.plan.layouts import Mesh, MeshLayout, Placement

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
            self.register_buffer(name, torch.linspace(-1, 1, 7).to(dtype))
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
        return Path(manager.save().wait().url)


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    flat = tensor.detach().contiguous().reshape(-1)
    return tensor.dtype, tuple(tensor.shape), bytes(flat.view(torch.uint8).numpy())


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
        assert sum(t.numel() * t.element_size() for t in held.values()) <= max_shard_bytes or sum(
            t.numel() > 0 for t in held.values()
        ) == 1


@pytest.mark.parametrize("window_bytes", [1, 8, 100, 1000, None])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_runs_are_byte_identical(
    root: Path, tmp_path: Path, window_bytes: int | None, num_threads: int
) -> None:
    """Neither a second run nor how much is read at a time changes a byte."""
    first, second = tmp_path / "first", tmp_path / "second"
    consolidate(root, first, max_shard_bytes=2000)
    consolidate(
        root, second, max_shard_bytes=2000, window_bytes=window_bytes, num_threads=num_threads
    )
    assert contents(first) == contents(second)


def test_a_tensor_larger_than_its_source_blocks_comes_out_in_windows(tmp_path: Path, out: Path) -> None:
    """Windows cut tensors inside 4 MiB blocks, along any dim."""
    torch.manual_seed(0)
    model = nn.ParameterDict({"wide": torch.randn(2, 3, 700_001), "long": torch.randn(900_001, 3)})
    save(tmp_path / "run", model)
    consolidate(tmp_path / "run", out, window_bytes=1_000_003)
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
    with pytest.raises(UnencodableStateError, match="wave.*C128"):
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


def flip_byte(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "missing": Path.unlink,
    "short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "header": lambda path: flip_byte(path, 20),
    "data": lambda path: flip_byte(path, 4096 + 3000),
}


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


# --- where to ---


@pytest.mark.parametrize("before", [1000, 10**9])
def test_an_older_run_is_replaced_only_when_asked_to(
    root: Path, tmp_path: Path, out: Path, before: int
) -> None:
    """Without overwrite nothing changes; with it no file of the older run stays, others do."""
    consolidate(root, out, max_shard_bytes=before)
    (out / "model-card.md").write_text("mine")
    (out / "model_ema.safetensors").write_text("mine")
    older = contents(out)
    with pytest.raises(AlreadyCommittedError, match="overwrite"):
        consolidate(root, out, max_shard_bytes=500)
    assert contents(out) == older
    for max_shard_bytes in (500, 10**9):
        consolidate(root, out, max_shard_bytes=max_shard_bytes, overwrite=True)
        fresh = tmp_path / str(max_shard_bytes)
        consolidate(root, fresh, max_shard_bytes=max_shard_bytes)
        mine = {"model-card.md": b"mine", "model_ema.safetensors": b"mine"}
        assert contents(out) == {**contents(fresh), **mine}


def test_configuration_is_copied(root: Path, tmp_path: Path, out: Path) -> None:
    """Small files come along, weights and their index do not; another file of that name is not lost."""
    origin = tmp_path / "origin"
    origin.mkdir()
    wanted = ["chat_template.jinja", "config.json", "merges.txt", "tokenizer.json", "tokenizer.model"]
    for name in (*wanted, INDEX, "pytorch_model.bin", "x.safetensors", "README.md"):
        (origin / name).write_text(name)
    report = consolidate(root, out, config_from=origin)
    assert list(report.companions) == wanted
    assert {n: c.decode() for n, c in contents(out).items() if n != "model.safetensors"} == {
        name: name for name in wanted
    }
    (out / "model.safetensors").unlink()
    consolidate(root, out, config_from=origin)
    (out / "model.safetensors").unlink()
    (out / "config.json").write_text("edited")
    with pytest.raises(AlreadyCommittedError, match=r"config\.json"):
        consolidate(root, out, config_from=origin)
    assert (out / "config.json").read_text() == "edited"
    consolidate(root, out, config_from=origin, overwrite=True)
    assert (out / "config.json").read_text() == "config.json"
    with pytest.raises(NotFoundError, match="nowhere"):
        consolidate(root, tmp_path / "other", config_from=tmp_path / "nowhere")


def test_an_object_store_gets_the_same_files(root: Path, tmp_path: Path, out: Path) -> None:
    """Through fsspec: the same bytes, replaced when asked to, and nothing left behind by damage."""
    import fsspec

    url = f"memory://{tmp_path.name}/out"
    fs, folder = fsspec.core.url_to_fs(url)

    def stored() -> dict[str, bytes]:
        return {p.rpartition("/")[2]: fs.cat_file(p) for p in fs.find(folder)}

    consolidate(root, url, max_shard_bytes=500, storage_options={"skip_instance_cache": True})
    consolidate(root, out, max_shard_bytes=500)
    assert stored() == contents(out)
    with pytest.raises(AlreadyCommittedError):
        consolidate(root, url)
    consolidate(root, url, overwrite=True)
    assert list(stored()) == ["model.safetensors"]
    DAMAGES["data"](next(root.glob("*/*/rank-*.safetensors")))
    with pytest.raises(CorruptCheckpointError):
        consolidate(root, url, max_shard_bytes=500, overwrite=True)
    assert stored() == {}


KILLED_RUN = """
import os, signal, sys
from fsdp_ckpt.hf import consolidate

root, out, die_at = sys.argv[1], sys.argv[2], int(sys.argv[3])
calls = 0

def die(event, args):
    global calls
    if event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link"):
        calls += 1
        if calls == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(die)
consolidate(root, out, max_shard_bytes=1500, overwrite=True)
"""


def test_a_killed_run_is_never_taken_for_a_whole_one(root: Path, tmp_path: Path, model: Kinds) -> None:
    """Killed before any of its changes to the folder: the old model, the new one, or none; a rerun succeeds."""
    older = tmp_path / "older"
    consolidate(root, older, max_shard_bytes=3500)
    with torch.no_grad():
        model.scale.fill_(7)
    save(root, model, 6)
    newer = tmp_path / "newer"
    consolidate(root, newer, max_shard_bytes=1500)
    assert contents(older).keys().isdisjoint(contents(newer).keys() - {INDEX})
    for die_at in range(1, 100):
        out = tmp_path / f"out-{die_at}"
        consolidate(root, out, step=5, max_shard_bytes=3500)
        command = [sys.executable, "-c", KILLED_RUN, str(root), str(out), str(die_at)]
        ended = subprocess.run(command, check=False, capture_output=True, text=True)
        assert ended.returncode in (0, -9), ended.stderr
        if (out / INDEX).exists():
            named = set(json.loads((out / INDEX).read_text())["weight_map"].values())
            whole = contents(older if ended.returncode else newer)
            assert {n: c for n, c in files_of(out).items() if n in named or n == INDEX} == whole
        assert not (out / "model.safetensors").exists()
        if ended.returncode == 0:
            break
        consolidate(root, out, max_shard_bytes=1500, overwrite=True)
        assert {p.name for p in out.iterdir()} == set(contents(newer))
        assert contents(out) == contents(newer)
    assert die_at > 8


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


# --- arithmetic ---


def row(name: str, dtype: str, shape: tuple[int, ...]) -> TensorRow:
    layout = MeshLayout(Mesh.world(1), (Placement(),))
    return TensorRow(path=("model", name), dtype=dtype, shape=shape, layout=layout)


shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)
tensors = st.lists(st.tuples(st.sampled_from(["F64", "F32", "BF16", "BOOL"]), shapes), min_size=1)


@given(tensors, st.integers(1, 3000), st.integers(8, 3000))
def test_windows_tile_every_file(
    given_tensors: list[tuple[str, tuple[int, ...]]], max_shard_bytes: int, max_bytes: int
) -> None:
    """Regions follow each other without gaps, every element once, no window above its size."""
    rows = [row(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(given_tensors)]
    files = lay_out_files(rows, max_shard_bytes)
    assert sorted(t.name for f in files for t in f.tensors) == sorted(r.name[6:] for r in rows)
    for file in files:
        position = 0
        held: dict[str, int] = {}
        for window in file.windows(max_bytes):
            assert sum(region.num_bytes for region in window) <= max_bytes
            for region in window:
                assert region.byte_offset == position
                position += region.num_bytes
                strides = [math.prod(region.row.shape[d + 1 :]) for d in range(len(region.row.shape))]
                first = sum(a * s for a, s in zip(region.box.offsets, strides, strict=True))
                assert first == held.get(region.row.name, 0)
                held[region.row.name] = first + region.box.num_elements
        assert position == file.data_bytes
        assert all(held.get(t.row.name, 0) == math.prod(t.row.shape) for t in file.tensors)
        header = file.header()
        assert len(header) % 64 == 0
        assert json.loads(header[8:]).keys() == {"__metadata__", *(t.name for t in file.tensors)}
    assert (index_of(files) is None) == (len(files) == 1)


def test_names_that_safetensors_reserves_are_refused() -> None:
    """A tensor of this name would vanish from the file."""
    with pytest.raises(UnencodableStateError, match="__metadata__"):
        lay_out_files([row("__metadata__", "F32", (1,))], 100)
