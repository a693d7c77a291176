"""Consolidation takes as much memory for a large model as for a small one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.weights import save

pytestmark = pytest.mark.few_ranks

MODEL_BYTES = 400_000_000
MOST_BYTES = 300_000_000

# A child's peak starts at the size of the process that forks it, so a small one in between starts it.
MEASURE = """
import os, subprocess, sys

process = subprocess.Popen([sys.executable, *sys.argv[1:]], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
print(status, usage.ru_maxrss)
"""


def peak_bytes(*arguments: str) -> int:
    """Run an interpreter; return its largest resident size."""
    command = [sys.executable, "-c", MEASURE, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=250)
    status, peak_kib = map(int, done.stdout.split())
    assert status == 0, done.stderr
    return peak_kib * 1024


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("large") / "run"
    num_elements = MODEL_BYTES // 4 // 8
    tensors = {f"t{i}": torch.full((num_elements,), float(i)) for i in range(8)}
    save(root, nn.ParameterDict(tensors))
    return root


@pytest.mark.parametrize("shard_size", ["400MB", "50MB"])
def test_peak_memory_is_bounded(root: Path, tmp_path: Path, shard_size: str) -> None:
    """Less than 300 MB over an idle interpreter, with one large file and with many."""
    command = ["-m", "fsdp_ckpt", "consolidate", str(root), str(tmp_path / "out")]
    taken = peak_bytes(*command, "--max-shard-size", shard_size) - peak_bytes("-c", "")
    assert taken < MOST_BYTES
    written = sum(os.stat(path).st_size for path in (tmp_path / "out").glob("*.safetensors"))
    assert written > MODEL_BYTES
