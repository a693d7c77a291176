"""Each example trains, is started again in the middle, and ends as it did the first time."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
from pathlib import Path

import pytest
import torch.distributed as dist

from fsdp_ckpt.testing import over_tcp, run_ranks

pytestmark = [pytest.mark.few_ranks, pytest.mark.slow]

os.environ["HF_HUB_OFFLINE"] = "1"

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = ["ddp", "fsdp1", "fsdp2", "hsdp", "plain_dcp", "trainer"]
NUM_STEPS, NUM_RANKS = 12, 2

Lives = dict[str, tuple[list[str], list[str]]]


def run_all(root: str) -> Lives:
    """Run each example to its end, and again without its last checkpoint; return what rank 0 printed."""
    return {name: run_twice(name, Path(root) / name) for name in NAMES}


def run_twice(name: str, root: Path) -> tuple[list[str], list[str]]:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    lines: list[str] = []
    vars(example)["print"] = lambda text, **kwargs: lines.append(text)
    example.train(root if name == "plain_dcp" else str(root))
    dist.barrier()
    if dist.get_rank() == 0:
        (last,) = root.rglob(f"step-{NUM_STEPS:09d}")
        shutil.rmtree(last)
    dist.barrier()
    first = lines.copy()
    lines.clear()
    example.train(root if name == "plain_dcp" else str(root))
    gc.collect()  # models hold the process group in cycles
    return first, lines.copy()


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Lives:
    """What all of them printed; ranks start once for all, since that takes longer than the examples do."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    root = str(tmp_path_factory.mktemp("examples"))
    return run_ranks(run_all, NUM_RANKS, root, env=over_tcp(), timeout_s=280).values[0]


@pytest.mark.parametrize("name", NAMES)
def test_an_example_goes_on_where_it_was(lives: Lives, name: str) -> None:
    """The steps after the checkpoint of step 8 come out with the same losses, digit by digit."""
    first, second = lives[name]
    assert first[0] == "begins at step 0"
    assert [line.split()[1] for line in first[1:]] == [str(i + 1) for i in range(NUM_STEPS)]
    assert second == ["begins at step 8", *first[-4:]]


def test_every_example_is_tested() -> None:
    """None is left out above."""
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == NAMES
