"""transformers loads what comes out of every layout: no key missing, none too many, the same logits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from fsdp_ckpt import CheckpointManager, TrainState
from fsdp_ckpt.hf import ExportOptions, consolidate, export, load
from fsdp_ckpt.testing import run_ranks
from tests.hf_models import (
    KINDS,
    Sharding,
    make_config,
    make_empty_model,
    make_model,
    model_class,
    outputs_of,
)
from tests.weights import INDEX, assert_equal, contents
from tests.weights import load as read

pytest.importorskip("transformers")

LAYOUTS = ["fsdp2-2", "fsdp1-2", "fsdp2-4", "fsdp1-4", "hsdp-4", "tp-fsdp2-4"]
SHARD_BYTES = 20_000
OPTIONS = ExportOptions(max_shard_bytes=SHARD_BYTES)


def save_all(root: str, names: list[str]) -> None:
    """Save every kind in every layout, and let it come and go as files too; on each rank."""
    sharding = Sharding()
    wraps = {f"{name}-{sharding.world_size}": wrap for name, wrap in sharding.wraps.items()}
    assert list(wraps) == names
    for kind in KINDS:
        folder = Path(root) / kind
        for name, wrap in wraps.items():
            model = wrap(kind, make_model(kind))
            with CheckpointManager(folder / name / "run", TrainState(model=model)) as manager:
                manager.save(mode="sync")
            if name.endswith("4"):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.zero_()
                load_and_export(model, folder, folder / name / "export")
        empty = sharding.fsdp2(kind, make_empty_model(kind), sharding.line)
        load_and_export(empty, folder, folder / f"meta-{sharding.world_size}")


def load_and_export(model: nn.Module, folder: Path, out: Path) -> None:
    load(model, folder / "origin")
    export(model, out, options=OPTIONS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every kind in every layout: its checkpoint, and its export."""
    root = tmp_path_factory.mktemp("saved")
    for kind in KINDS:
        model = make_model(kind)
        (root / kind).mkdir()
        model.save_pretrained(root / kind / "origin")
        with CheckpointManager(root / kind / "plain-1" / "run", TrainState(model=model)) as manager:
            manager.save(mode="sync")
    for world_size in (2, 4):
        names = [name for name in LAYOUTS if name.endswith(str(world_size))]
        run_ranks(save_all, world_size, str(root), names)
    return root


def check_loads(kind: str, model: nn.Module, out: Path) -> None:
    """Load files as a user does, and compare."""
    make_config(kind).save_pretrained(out)
    loaded, info = model_class(kind).from_pretrained(out, output_loading_info=True)
    assert {name: list(keys) for name, keys in info.items() if keys} == {}
    assert torch.equal(outputs_of(kind, loaded.eval()), outputs_of(kind, model))
    state, found = model.state_dict(), loaded.state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def check_index(out: Path) -> None:
    """The index names what the files hold, and each opens."""
    weight_map = json.loads((out / INDEX).read_text())["weight_map"]
    held: dict[str, str] = {}
    for path in out.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            held |= dict.fromkeys(file.keys(), path.name)
    assert held == weight_map


@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_gives_what_transformers_loads(saved: Path, tmp_path: Path, kind: str) -> None:
    """One model, any number of ranks in any layout, a checkpoint or an export: the same files, which load."""
    model = make_model(kind)
    out = tmp_path / "plain"
    consolidate(saved / kind / "plain-1" / "run", out, max_shard_bytes=SHARD_BYTES)
    for name in LAYOUTS:
        other = tmp_path / name
        consolidate(saved / kind / name / "run", other, max_shard_bytes=SHARD_BYTES)
        if name.endswith("4"):
            assert contents(saved / kind / name / "export") == contents(other), name
        if name.startswith("fsdp1"):  # its tensors come unit by unit
            assert_equal(read(other), read(out))
            check_index(other)
            check_loads(kind, model, other)
        else:
            assert contents(other) == contents(out), name
    for name in ("meta-2", "meta-4"):
        assert contents(saved / kind / name) == contents(out)
    check_index(out)
    check_loads(kind, model, out)
    consolidate(saved / kind / "plain-1" / "run", tmp_path / "one")
    assert set(contents(tmp_path / "one")) == {"model.safetensors"}
    check_loads(kind, model, tmp_path / "one")


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_without_memory_loads_what_transformers_wrote(saved: Path, kind: str) -> None:
    """Built on the meta device, tied as before, the same logits."""
    empty, model = make_empty_model(kind), make_model(kind)
    load(empty, saved / kind / "origin")
    assert torch.equal(outputs_of(kind, empty), outputs_of(kind, model))
    assert len(list(empty.parameters())) == len(list(model.parameters()))
