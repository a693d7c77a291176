"""Every layout loads into every other: to the bit, and the next step is the unsharded one.

one process, 2 and 4 ranks    save every layout once, after two steps
one process, 2 and 4 ranks    restore each of them into every layout, by an optimizer that has not
                              stepped and by one that has; compare; step; compare

Layouts that save the very same files are one source.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_ckpt import CheckpointManager
from fsdp_ckpt.commit.checkpoint import Checkpoint
from fsdp_ckpt.storage.local import LocalStore
from fsdp_ckpt.testing import over_tcp, run_ranks
from tests.layouts import (
    Layouts,
    Live,
    Net,
    differences,
    reference,
    spoil,
    whole_parameters,
)

pytestmark = pytest.mark.timeout(900)  # the first test waits for the ranks of all

NUM_LAYOUTS = 14
# Layout -> the one that saves the same files.
TWINS = {
    "ddp": "plain",
    "fsdp1-SHARD_GRAD_OP-orig": "fsdp1-FULL_SHARD-orig",
    "fsdp1-SHARD_GRAD_OP-flat": "fsdp1-FULL_SHARD-flat",
}
NUM_SOURCES = NUM_LAYOUTS - len(TWINS)
NUM_STEPS = 2  # before the save


def save_layouts(root: str) -> None:
    """Save the model in every layout, once FSDP1 and FSDP2 have worked in earnest."""
    layouts = Layouts()
    for name in layouts.names():
        live = layouts.attach(name, layouts.build(name, seed=0))
        train_and_save(live, f"{root}/{layouts.world_size}/{name}", used=name != "pipeline")


def train_and_save(live: Live, root: str, *, used: bool) -> None:
    if used:
        use(live)
    for _ in range(NUM_STEPS):
        live.step()
    with CheckpointManager(root, live.state, timeout_s=250) as manager:
        manager.save(mode="sync")


def use(live: Live) -> None:
    """Run forward and backward, as training would; the gradients are dropped."""
    live.model(torch.ones(2, 5)).backward()
    live.optimizer.zero_grad()


def load_into_layouts(root: str) -> tuple[int, list[str]]:
    """Restore every source into every layout; return the number of pairs, and what went wrong.

    The sources of today's world size meet both kinds of targets, every other source one of them. In the
    end each layout saves what it has resumed, as ``again-<world size>/<layout>``.
    """
    layouts = Layouts()
    num_pairs, failures = 0, []
    for i, name in enumerate(layouts.names()):
        live = layouts.attach(name, layouts.build(name, seed=1))
        # First all pairs in which neither model nor optimizer was ever used.
        for stepped in (False, True):
            if stepped and name != "pipeline":
                use(live)
            for j, source in enumerate(distinct(sources_of(root, "4", "2", "1"))):
                if not source.startswith(f"{layouts.world_size}/") and (i + j) % 2 != stepped:
                    continue
                if not stepped:
                    live = layouts.attach(name, live.model)
                pair = f"{source} -> {name}, {'stepped' if stepped else 'fresh'}"
                found = pair_failures(live, f"{root}/{source}", NUM_STEPS)
                failures.extend(f"{pair}: {failure}" for failure in found)
                num_pairs += 1
        if name != "pipeline":
            for parameter, tensor in whole_parameters(live.model).items():
                if not torch.equal(tensor, reference(NUM_STEPS + 1)[f"model.{parameter}"]):
                    failures.append(f"{name}: torch's own gather of {parameter} differs")
        folder = f"{root}/again-{layouts.world_size}/{name}"
        with CheckpointManager(folder, live.state, timeout_s=250) as manager:
            manager.save(mode="sync")
    return num_pairs, failures


def pair_failures(live: Live, root: str, step: int) -> Iterator[str]:
    """Restore the checkpoint of ``step``, train a step, and yield what is not the reference."""
    spoil(live)
    try:
        with CheckpointManager(root, live.state, timeout_s=250) as manager:
            report = manager.restore()
    except Exception as e:  # all ranks raise it: the other pairs can go on
        yield f"{type(e).__name__}: {e}"
        return
    if report.step != step or report.missing or report.unexpected or report.dropped:
        yield str(report)
    yield from differences(live, reference(step))
    live.step()
    yield from (f"after a step: {found}" for found in differences(live, reference(step + 1)))


def sources_of(root: str, *folders: str) -> list[str]:
    return [
        f"{folder}/{name}" for folder in folders for name in sorted(os.listdir(f"{root}/{folder}"))
    ]


def distinct(sources: list[str]) -> list[str]:
    return [source for source in sources if Path(source).name not in TWINS]


def stored(root: str) -> tuple[Any, ...]:
    """Return all that a restore reads, but for what is of the one save: its name, its time."""
    (folder,) = Path(root).glob("step-*")
    checkpoint = Checkpoint.open(LocalStore(str(folder)))
    files = checkpoint.manifest.files
    headers = [checkpoint.header(rank) for rank in range(len(files))]
    return (
        replace(checkpoint.manifest, attempt="", created="", files=(), values={}),
        {p: v for p, v in checkpoint.manifest.values.items() if p != ("run", "uptime_s")},
        [replace(header, attempt="", shared={}, manifest=None) for header in headers],
        [(folder / file.name).read_bytes()[file.data_offset :] for file in files],
    )


def one_process_failures(root: str, sources: list[str], step: int) -> list[str]:
    """Restore every source into a plain model of this process, twice."""
    failures = []
    for source in sources:
        live = Live.of(Net(1))
        for optimizer in ("fresh", "stepped"):
            found = pair_failures(live, f"{root}/{source}", step)
            failures.extend(f"{source} -> one process, {optimizer}: {failure}" for failure in found)
    return failures


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of all sources: ``1/plain``, ``2/<layout>``, ``4/<layout>``."""
    return str(tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="module")
def outcomes(root: str) -> dict[int, list[tuple[int, list[str]]]]:
    """Return world size → per rank, the number of pairs and what went wrong."""
    train_and_save(Live.of(Net(0)), f"{root}/1/plain", used=True)
    for world_size in (4, 2):
        run_ranks(save_layouts, world_size, root, env=over_tcp())
    return {
        n: run_ranks(load_into_layouts, n, root, timeout_s=800, env=over_tcp()).values
        for n in (4, 2)
    }


@pytest.mark.parametrize("world_size", [4, 2])
def test_every_layout_loads_into_every_other(
    root: str, outcomes: dict[int, list[tuple[int, list[str]]]], world_size: int
) -> None:
    """All pairs are exact, on the same number of ranks and another; what they resumed can be saved again."""
    for num_pairs, failures in outcomes[world_size]:
        assert failures == []
        assert num_pairs == NUM_LAYOUTS * (2 * NUM_SOURCES + NUM_SOURCES + 1)
    again = sources_of(root, f"again-{world_size}")
    assert len(again) == NUM_LAYOUTS
    assert one_process_failures(root, again, NUM_STEPS + 1) == []


@pytest.mark.usefixtures("outcomes")
def test_every_layout_loads_into_one_process(root: str) -> None:
    """A plain model without a process group takes over any of them."""
    sources = distinct(sources_of(root, "4", "2", "1"))
    assert len(sources) == 2 * NUM_SOURCES + 1
    assert one_process_failures(root, sources, NUM_STEPS) == []


@pytest.mark.usefixtures("outcomes")
@pytest.mark.parametrize("layout", TWINS)
@pytest.mark.parametrize("world_size", [4, 2])
def test_twins_save_the_same_files(root: str, world_size: int, layout: str) -> None:
    """Where one of them loads the other one does: what they saved differs in names and times alone."""
    twin, other = (stored(f"{root}/{world_size}/{name}") for name in (layout, TWINS[layout]))
    assert twin == other
