"""Every layout loads into every other: to the bit, and the next step is the unsharded one.

    one process, 2 and 4 ranks    save every layout once, after two steps
    one process, 2 and 4 ranks    restore each of them into every layout, by an optimizer that has not
                                  stepped and by one that has; compare; step; compare
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_ckpt import CheckpointManager
from fsdp_ckpt.testing import run_ranks
from tests.layouts import (
    Layouts,
    Live,
    Net,
    differences,
    reference,
    spoil,
    whole_parameters,
)

NUM_LAYOUTS = 14
NUM_STEPS = 2  # before the save


def save_layouts(root: str) -> None:
    """Save the model in every layout, once FSDP1 and FSDP2 have worked in earnest."""
    layouts = Layouts()
    for name in layouts.names():
        live = layouts.attach(name, layouts.build(name, seed=0))
        train_and_save(live, f"{root}/{name}", used=name != "pipeline")


def train_and_save(live: Live, root: str, *, used: bool) -> None:
    if used:
        use(live)
    for _ in range(NUM_STEPS):
        live.step()
    with CheckpointManager(root, live.state, timeout_s=60) as manager:
        manager.save()


def use(live: Live) -> None:
    """Run forward and backward, as training would; the gradients are dropped."""
    live.model(torch.ones(2, 5)).backward()
    live.optimizer.zero_grad()


def load_into_layouts(root: str, sources: list[str], own: str) -> tuple[int, list[str]]:
    """Restore every source into every layout; return the number of pairs, and what went wrong.

    Args:
        root: Of all sources.
        sources: Their folders.
        own: The world size of today; its sources meet both kinds of targets, others one.
    """
    layouts = Layouts()
    then, after = reference(NUM_STEPS), reference(NUM_STEPS + 1)
    num_pairs, failures = 0, []
    for i, name in enumerate(layouts.names()):
        live = layouts.attach(name, layouts.build(name, seed=1))
        # First the whole row of targets whose model and optimizer were never used.
        for stepped in (False, True):
            if stepped and name != "pipeline":
                use(live)
            for j, source in enumerate(sources):
                if not source.startswith(f"{own}/") and (i + j) % 2 != stepped:
                    continue
                if not stepped:
                    live = layouts.attach(name, live.model)
                pair = f"{source} -> {name}, {'stepped' if stepped else 'fresh'}"
                found = list(pair_failures(live, f"{root}/{source}", then, after))
                failures.extend(f"{pair}: {failure}" for failure in found)
                num_pairs += 1
        if name != "pipeline":
            for parameter, tensor in whole_parameters(live.model).items():
                if not torch.equal(tensor, after[f"model.{parameter}"]):
                    failures.append(f"{name}: torch's own gather of {parameter} differs")
        del live
        gc.collect()
    return num_pairs, failures


def pair_failures(
    live: Live, root: str, then: dict[str, Any], after: dict[str, Any]
) -> Iterator[str]:
    """Restore, step, and yield what is not the reference."""
    spoil(live)
    try:
        with CheckpointManager(root, live.state, timeout_s=60) as manager:
            report = manager.restore()
    except Exception as e:  # all ranks raise it: the other pairs can go on
        yield f"{type(e).__name__}: {e}"
        return
    if report.step != NUM_STEPS or report.missing or report.unexpected or report.dropped:
        yield str(report)
    yield from differences(live, then)
    live.step()
    yield from (f"after a step: {found}" for found in differences(live, after))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of all sources: ``1/plain``, ``2/<layout>``, ``4/<layout>``."""
    root = tmp_path_factory.mktemp("sources")
    train_and_save(Live.of(Net(0)), str(root / "1" / "plain"), used=True)
    for world_size in (2, 4):
        run_ranks(save_layouts, world_size, str(root / str(world_size)))
    return root


def sources_of(root: Path, *world_sizes: int) -> list[str]:
    return [f"{n}/{folder.name}" for n in world_sizes for folder in sorted((root / str(n)).iterdir())]


@pytest.mark.parametrize(("own", "other"), [(4, 2), (2, 4)])
def test_every_layout_loads_into_every_other(root: Path, own: int, other: int) -> None:
    """All pairs of layouts, on the same number of ranks and from another one, are exact."""
    sources = sources_of(root, own, other, 1)
    assert len(sources) == 2 * NUM_LAYOUTS + 1
    values = run_ranks(load_into_layouts, own, str(root), sources, str(own), timeout_s=200).values
    for num_pairs, failures in values:
        assert failures == []
        assert num_pairs == NUM_LAYOUTS * (2 * NUM_LAYOUTS + NUM_LAYOUTS) + NUM_LAYOUTS


def test_every_layout_loads_into_one_process(root: Path) -> None:
    """A plain model in one process takes over any of them, without a process group."""
    then, after = reference(NUM_STEPS), reference(NUM_STEPS + 1)
    sources = sources_of(root, 4, 2, 1)
    failures = []
    for source in sources:
        live = Live.of(Net(1))
        for stepped in (False, True):
            found = pair_failures(live, str(root / source), then, after)
            failures.extend(f"{source}, {'stepped' if stepped else 'fresh'}: {f}" for f in found)
    assert failures == []
    assert len(sources) == 2 * NUM_LAYOUTS + 1
