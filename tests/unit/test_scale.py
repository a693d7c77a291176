"""Plans for thousands of ranks: what they say, how large they are; scripts/simulate_scale.py times them."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from pathlib import Path

import pytest

from fsdp_ckpt.commit.publish import MANIFEST_KEY, read_manifest
from fsdp_ckpt.dcp.agreement import Agreement, agree
from fsdp_ckpt.dcp.summary import Item, Summary
from fsdp_ckpt.manifest.tree import path_name
from fsdp_ckpt.plan.box import Box
from fsdp_ckpt.plan.dtypes import itemsize
from fsdp_ckpt.plan.layouts import Mesh, MeshLayout, Placement
from fsdp_ckpt.storage.open import open_store
from scripts import simulate_scale as scale

NUM_TENSORS = 4 * len(scale.parameter_shapes())


def test_the_model_is_as_large_as_its_name_says() -> None:
    """126 layers make 1,137 parameters of 405 billion elements."""
    assert len(scale.parameter_shapes()) == 1137
    assert round(sum(math.prod(s) for s in scale.parameter_shapes().values()) / 1e9) == 406


def test_the_simulation_tells_what_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """One number of ranks gives the five figures."""
    monkeypatch.setattr(scale, "REPEATS", 1)
    found = scale.simulate(64)
    assert list(found) == [
        "coordinator_s",
        "coordinator_mb",
        "save_plan_s",
        "load_plan_s",
        "manifest_bytes",
    ]
    assert all(value > 0 for value in found.values())


@pytest.fixture(scope="module")
def largest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a manifest of 16,384 ranks lies."""
    folder = tmp_path_factory.mktemp("largest")
    scale.coordinate(scale.summary_of(16384), scale.receipts_of(16384), str(folder))
    return folder


def test_the_manifest_grows_with_tensors_and_ranks(largest: Path, tmp_path: Path) -> None:
    """A row per tensor and a row per file, whatever the ranks hold: under 8 MB for 16,384 ranks."""
    scale.coordinate(scale.summary_of(64), scale.receipts_of(64), str(tmp_path))
    few, many = (open_store(where).size(MANIFEST_KEY) for where in (tmp_path, largest))
    assert many < 8_000_000
    assert few < 150 * (NUM_TENSORS + 64)
    assert (many - few) / (16384 - 64) < 120
    manifest = read_manifest(open_store(largest))
    assert (len(manifest.tensors), len(manifest.files)) == (NUM_TENSORS, 16384)


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_ranks_plan_alone_what_the_rules_say_for_all(num_replicas: int) -> None:
    """What the ranks lay out, each for itself, is every chunk of every tensor exactly once."""
    agreement = agree([scale.summary_of(8, num_replicas)] * 8)
    planned = Counter(
        (name, rank, box) for rank in range(8) for name, _, _, box in agreement.chunks_of(rank)
    )
    expected: Counter[tuple[str, int, Box]] = Counter()
    for row in agreement.tensors:
        chunks = row.chunks
        expected.update((row.name, int(r), chunks.box(i)) for i, r in enumerate(chunks.ranks))
    assert planned == expected
    assert set(planned.values()) == {1}
    assert len({name for name, _, _ in planned}) == NUM_TENSORS


def bytes_by_rank(agreement: Agreement, num_ranks: int) -> list[int]:
    return [
        sum(itemsize(dtype) * box.num_elements for _, dtype, _, box in agreement.chunks_of(rank))
        for rank in range(num_ranks)
    ]


@pytest.mark.parametrize("num_replicas", [2, 4, 16])
def test_replicas_are_written_once_and_evenly(num_replicas: int) -> None:
    """HSDP writes the state once; no rank writes a tenth more than its share."""
    summary = scale.summary_of(16, num_replicas)
    written = bytes_by_rank(agree([summary] * 16), 16)
    items = [item for item in summary.items.values() if item.kind == "tensor"]
    assert sum(written) == sum(math.prod(i.shape) * itemsize(i.dtype) for i in items)
    assert max(written) <= 1.1 * sum(written) / 16


@pytest.mark.parametrize("rank", [0, 1, 5000, 12287])
def test_a_loading_rank_touches_few_chunks(largest: Path, rank: int) -> None:
    """From 16,384 ranks to 12,288: at most three chunks per tensor, which make up what the rank holds."""
    live = scale.summary_of(12288)
    items = scale.plan_load(str(largest), live, rank)
    per_tensor = Counter(item.dest_index.fqn for item in items)
    assert max(per_tensor.values()) <= 3
    read = Counter[str]()
    for item in items:
        read[item.dest_index.fqn] += math.prod(item.lengths)
    for name, item in live.items.items():
        if item.kind == "tensor" and item.layout is not None:
            held = item.layout.boxes_of(item.shape, rank)
            assert read[name] == sum(box.num_elements for box in held)


def copy_of(summary: Summary) -> Summary:
    return Summary.from_json(summary.to_json())


def small_summary(content: str = "a", lacks: str = "") -> Summary:
    """Return a summary of one leaf of each kind for four ranks."""
    mesh = Mesh((2, 2), (0, 1, 2, 3))
    items = [
        Item(
            kind="tensor",
            path=("w",),
            dtype="F32",
            shape=(8, 3),
            layout=MeshLayout(mesh, (Placement(), Placement(0))),
        ),
        Item(kind="tensor", path=("buffer",), dtype="BF16", shape=(5,), digest=content),
        Item(kind="tensor", path=("step",), dtype="F32", shape=(), digest="b"),
        Item(kind="value", path=("data", "epoch"), digest=content),
        Item(kind="own", path=("rng",)),
    ]
    return Summary({path_name(i.path): i for i in items if path_name(i.path) != lacks})


@pytest.mark.parametrize("kinds", ["aaaa", "aaba", "baaa", "abab", "abca", "a-aa", "-aaa", "a-b-"])
def test_equal_summaries_count_as_one(kinds: str) -> None:
    """Ranks that say the same are looked at once, and the agreement is as if each were alone."""
    known = {k: small_summary(k) for k in kinds} | {"-": small_summary("a", lacks="data.epoch")}
    together = agree([known[k] for k in kinds], parts=("data",))
    apart = agree([copy_of(known[k]) for k in kinds], parts=("data",))
    assert dataclasses.asdict(together) == dataclasses.asdict(apart)
