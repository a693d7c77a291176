"""What DeepSpeed saves today comes in as what it says itself is in there."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fsdp_ckpt.deepspeed import import_deepspeed
from fsdp_ckpt.hf.consolidate import consolidate
from fsdp_ckpt.testing import run_ranks
from tests.bits import bits
from tests.deepspeed_files import EXPECTED, save_runs
from tests.weights import load

pytestmark = [
    pytest.mark.few_ranks,
    pytest.mark.timeout(
        600
    ),  # DeepSpeed takes seconds to load, and minutes on a machine that is busy
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None, reason="needs the deepspeed extra"
    ),
]

# Stages 2 and 3 in 16 bits are in tests/deepspeed_v0, which costs no start of DeepSpeed.
RUNS = {"stage1": (1, "bf16"), "stage3": (3, "fp32")}


def test_it_equals_deepspeeds_own_consolidation(tmp_path: Path) -> None:
    """Two ranks train and save; weights are equal to the bit, moments are all there."""
    assert not run_ranks(save_runs, 2, str(tmp_path), RUNS, timeout_s=500).failed
    for name, (stage, _) in RUNS.items():
        report = import_deepspeed(tmp_path / name, tmp_path / f"run-{name}", world_size=1)
        assert report.stage == stage
        consolidate(tmp_path / f"run-{name}", tmp_path / f"hf-{name}")
        found = load(tmp_path / f"hf-{name}")
        shard = load_file(next(Path(report.output).glob("*/*.safetensors")))
        for key, tensor in load_file(tmp_path / name / EXPECTED).items():
            kind, _, parameter = key.partition("/")
            if kind != "model":
                assert bits(shard[f"optimizer.state.{parameter}.{kind}"]) == bits(tensor), key
            elif parameter != "head.weight":  # tied: once in our files
                assert bits(found[parameter]) == bits(tensor), key
        assert torch.equal(shard["optimizer.state.scale.step"], torch.tensor(2.0))
