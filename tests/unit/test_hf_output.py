"""What stands in the output folder is a whole model or none, when a run is refused, fails or is killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
import torch

from fsdp_ckpt import AlreadyCommittedError, CorruptCheckpointError, NotFoundError
from fsdp_ckpt.hf import consolidate
from tests.weights import DAMAGES, INDEX, Kinds, contents, save


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


@pytest.mark.parametrize("before", [1000, 10**9])
def test_an_older_run_is_replaced_only_when_asked_to(
    root: Path, tmp_path: Path, out: Path, before: int
) -> None:
    """Without overwrite nothing changes; with it no file of the older run stays, others do."""
    consolidate(root, out, max_shard_bytes=before)
    (out / "model-card.md").write_text("mine")
    (out / "model_ema.safetensors").write_text("mine")
    older = contents(out)
    with pytest.raises(AlreadyCommittedError, match="not empty"):
        consolidate(root, out, max_shard_bytes=500)
    assert contents(out) == older
    for max_shard_bytes in (500, 10**9):
        consolidate(root, out, max_shard_bytes=max_shard_bytes, overwrite=True)
        fresh = tmp_path / str(max_shard_bytes)
        consolidate(root, fresh, max_shard_bytes=max_shard_bytes)
        mine = {"model-card.md": b"mine", "model_ema.safetensors": b"mine"}
        assert contents(out) == {**contents(fresh), **mine}


def test_configuration_is_copied(root: Path, tmp_path: Path, out: Path) -> None:
    """Small files come along, weights and their index do not; a folder that holds anything is refused."""
    origin = tmp_path / "origin"
    origin.mkdir()
    wanted = [
        "chat_template.jinja",
        "config.json",
        "merges.txt",
        "tokenizer.json",
        "tokenizer.model",
    ]
    for name in (*wanted, INDEX, "pytorch_model.bin", "x.safetensors", "README.md"):
        (origin / name).write_text(name)
    report = consolidate(root, out, config_from=origin)
    assert list(report.companions) == wanted
    assert {n: c.decode() for n, c in contents(out).items() if n != "model.safetensors"} == {
        name: name for name in wanted
    }
    (out / "model.safetensors").unlink()
    (out / "config.json").write_text("edited")
    with pytest.raises(AlreadyCommittedError, match=r"chat_template\.jinja"):
        consolidate(root, out, config_from=origin)
    assert (out / "config.json").read_text() == "edited"
    consolidate(root, out, config_from=origin, overwrite=True)
    assert (out / "config.json").read_text() == "config.json"
    with pytest.raises(NotFoundError, match="nowhere"):
        consolidate(root, tmp_path / "other", config_from=tmp_path / "nowhere")


def test_an_object_store_gets_the_same_files(root: Path, tmp_path: Path, out: Path) -> None:
    """Through fsspec: the same bytes, replaced when asked to, and nothing left behind by damage."""
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


def test_a_killed_run_is_never_taken_for_a_whole_one(
    root: Path, tmp_path: Path, model: Kinds
) -> None:
    """Killed before any of its changes: the old model, the new one, or none; a rerun succeeds."""
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
            found = {n: c for n, c in files_of(out).items() if n in named or n == INDEX}
            assert found in (contents(older), contents(newer))
        assert not (out / "model.safetensors").exists()
        if ended.returncode == 0:
            break
        consolidate(root, out, max_shard_bytes=1500, overwrite=True)
        assert {p.name for p in out.iterdir()} == set(contents(newer))
        assert contents(out) == contents(newer)
    assert die_at > 8
    assert contents(out) == contents(newer)


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
