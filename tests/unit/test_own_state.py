"""A rank's own state that is not there."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from fsdp_ckpt import CheckpointManager, CorruptCheckpointError, TrainState
from fsdp_ckpt.commit.checkpoint import Checkpoint
from fsdp_ckpt.commit.verify import find_damage
from fsdp_ckpt.manifest.schema import Manifest
from fsdp_ckpt.plan.layouts import Mesh, MeshLayout, Placement
from fsdp_ckpt.storage.open import open_store


def test_a_missing_own_value_is_an_error(tmp_path: Path) -> None:
    """What the manifest says every rank has for itself is never made up, and nothing live changes."""
    model = nn.Linear(2, 2)
    manager = CheckpointManager(tmp_path, TrainState(model=model))
    manager.save(mode="sync")
    path = tmp_path / "step-000000000" / "manifest.json"
    manifest = Manifest.from_bytes(path.read_bytes(), "manifest")
    more = (*manifest.rank_local, ("rng", "global", "quantum", "state"))
    path.write_bytes(dataclasses.replace(manifest, rank_local=more).to_bytes())
    with torch.no_grad():
        model.weight.zero_()
    with pytest.raises(CorruptCheckpointError, match=r"lacks the rank's own rng\.global\.quantum"):
        manager.restore(0)
    assert not model.weight.any()


def test_a_tensor_in_the_manifest_must_be_in_its_file_too(tmp_path: Path) -> None:
    """Verification looks for the chunk of a small tensor in the file, though no load reads it there."""
    manager = CheckpointManager(tmp_path, TrainState(model=nn.Linear(2, 2)))
    manager.save(mode="sync")
    folder = tmp_path / "step-000000000"
    path = folder / "manifest.json"
    manifest = Manifest.from_bytes(path.read_bytes(), "manifest")
    row = next(row for row in manifest.tensors if row.is_inline)
    more = dataclasses.replace(
        row, path=("model", "more"), layout=MeshLayout(Mesh.world(1), (Placement(),))
    )
    changed = dataclasses.replace(
        manifest,
        tensors=(*manifest.tensors, more),
        inline={**manifest.inline, "model.more": bytes(more.num_bytes)},
    )
    assert list(find_damage(Checkpoint.open(open_store(folder)))) == []
    path.write_bytes(changed.to_bytes())
    (found,) = find_damage(Checkpoint.open(open_store(folder)))
    assert "model.more" in str(found)
