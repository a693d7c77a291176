"""Ranks that consolidate together write what one process writes, and fail together."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_ckpt import CheckpointError, CheckpointManager, TrainState
from fsdp_ckpt.hf import consolidate
from fsdp_ckpt.hf.copying import CopyOptions
from fsdp_ckpt.hf.ranked import consolidate_on_ranks
from fsdp_ckpt.hf.selection import Selection
from fsdp_ckpt.storage.local import LocalStore
from fsdp_ckpt.testing import over_tcp, run_ranks
from tests.weights import DAMAGES, contents

SMALL = CopyOptions(window_bytes=4096, num_threads=2)
OPTIONS: dict[str, dict[str, Any]] = {
    "many files": {"max_shard_bytes": 9_000},
    "one file": {},
    "converted": {"max_shard_bytes": 3_000, "selection": Selection(dtype="BF16", prefix="a.")},
    "optimizer": {"max_shard_bytes": 9_000, "selection": Selection(what="optimizer")},
}


class Reads:
    """Notes the shard files that this process reads."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        read_into = LocalStore.read_into

        def noted(store: LocalStore, key: str, byte_offset: int, buffer: memoryview) -> None:
            self.names.add(key.rpartition("/")[2])
            read_into(store, key, byte_offset, buffer)

        LocalStore.read_into = noted  # type: ignore[method-assign]  # of this process, which ends


def save_sharded(root: str) -> None:
    """Save a model with tensors of every sharding, uneven ones too, after a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 50), nn.Linear(50, 31), nn.Embedding(40, 16))
    model[1].half()
    model.register_buffer("seen", torch.tensor(7))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with CheckpointManager(root, TrainState(model=model, optimizer=optimizer)) as manager:
        manager.save(mode="sync")


FAILING: dict[str, dict[str, Any]] = {
    "CorruptCheckpointError": {"max_shard_bytes": 9_000},
    "MismatchError": {"selection": Selection(rename=((".*", "same"),))},
}


def consolidate_all(folder: str) -> tuple[list[str], list[str]]:
    """Consolidate in every way; return the source files that this rank has read, and what has failed."""
    reads = Reads()
    for name, options in OPTIONS.items():
        consolidate_on_ranks(f"{folder}/run", f"{folder}/{name}", copying=SMALL, **options)
    errors = []
    for kind, options in FAILING.items():
        try:
            consolidate_on_ranks(f"{folder}/damaged", f"{folder}/{kind}", copying=SMALL, **options)
        except CheckpointError as e:
            errors.append(f"{type(e).__name__}: {e}")
    return sorted(reads.names), errors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three ranks, a damaged copy of it, and what two ranks have made of them."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(save_sharded, 3, str(folder / "run"))
    shutil.copytree(folder / "run", folder / "damaged")
    DAMAGES["data"](next((folder / "damaged").glob("*/*/rank-00002*.safetensors")))
    return folder


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> list[tuple[list[str], list[str]]]:
    return run_ranks(consolidate_all, 2, str(folder), env=over_tcp()).values


@pytest.mark.parametrize("name", OPTIONS)
def test_two_ranks_write_what_one_process_does(folder: Path, outcomes: Any, name: str) -> None:
    """The same bytes, whatever is asked for."""
    consolidate(folder / "run", folder / f"{name}, alone", **OPTIONS[name])
    assert contents(folder / name) == contents(folder / f"{name}, alone")
    assert (len(contents(folder / name)) > 2) == ("max_shard_bytes" in OPTIONS[name])


def test_each_source_file_is_read_by_one_rank(outcomes: Any) -> None:
    """No byte travels twice from the source, not even a header's."""
    (first, _), (second, _) = outcomes
    assert set(first).isdisjoint(second)
    names = [f"rank-{rank:05d}-of-00003.safetensors" for rank in range(3)]
    assert sorted([*first, *second]) == names


def test_ranks_fail_together_and_publish_nothing(folder: Path, outcomes: Any) -> None:
    """Damage that one rank finds while reading is the error of all; a plan that fails is, too."""
    (_, first), (_, second) = outcomes
    assert first == second
    assert [error.partition(":")[0] for error in first] == list(FAILING)
    assert "rank-00002-of-00003.safetensors" in first[0]
    for kind in FAILING:
        assert not (folder / kind).exists() or contents(folder / kind) == {}


def test_torchrun_runs_the_command(folder: Path, tmp_path: Path) -> None:
    """``torchrun -m fsdp_ckpt consolidate``: rank 0 speaks, and the exit code is 0."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    consolidating = ["-m", "fsdp_ckpt", "consolidate", str(folder / "run"), str(tmp_path / "out")]
    ended = subprocess.run(
        [*command, *consolidating, "--max-shard-size", "9kB"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=250,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("file(s)") == 1
    consolidate(folder / "run", tmp_path / "alone", max_shard_bytes=9_000)
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")
