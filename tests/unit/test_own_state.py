"""A rank's own state that is not there."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from fsdp_ckpt import CheckpointManager, CorruptCheckpointError, TrainState
from fsdp_ckpt.manifest.schema import Manifest


def test_a_missing_own_value_is_an_error(tmp_path: Path) -> None:
    """What the manifest says every rank has for itself is never made up, and nothing live changes."""
    model = nn.Linear(2, 2)
    manager = CheckpointManager(tmp_path, TrainState(model=model))
    manager.save()
    path = tmp_path / "step-000000000" / "manifest.json"
    manifest = Manifest.from_bytes(path.read_bytes(), "manifest")
    more = (*manifest.rank_local, ("rng", "global", "quantum", "state"))
    path.write_bytes(dataclasses.replace(manifest, rank_local=more).to_bytes())
    with torch.no_grad():
        model.weight.zero_()
    with pytest.raises(CorruptCheckpointError, match=r"lacks the rank's own rng\.global\.quantum"):
        manager.restore(0)
    assert not model.weight.any()
