"""Hugging Face files, resharded checkpoints and exports, on real ranks in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp_ckpt import CheckpointManager, MismatchError, StorageError
from fsdp_ckpt.hf import ExportOptions, export, load, reshard
from fsdp_ckpt.testing import run_ranks
from fsdp_ckpt.weights import export as exporting
from tests.bits import random_bits
from tests.hf_files import write_files
from tests.layouts import Layouts, Live, Net, differences, live_parts, reference, whole_parameters
from tests.weights import assert_equal, contents
from tests.weights import load as read

WORLD_SIZE = 4
LOADED = [
    "plain", "ddp", "fsdp2", "hsdp", "tp", "tp-fsdp2", "fsdp1-FULL_SHARD-orig", "fsdp1-FULL_SHARD-flat",
    "fsdp1-HYBRID_SHARD-orig",
]  # fmt: skip


def parameters_of(seed: int) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in Net(seed).named_parameters()}


def load_everywhere(source: str, damaged: str) -> dict[str, list[str]]:
    """Load into every layout; on each rank. Return what is not as it must be, by layout."""
    layouts, found = Layouts(), {}
    expected = parameters_of(0)
    total = sum(p.nbytes for p in Net(0).state_dict().values())
    for name in LOADED:
        model = layouts.build(name, seed=1)
        report = load(model, source)
        whole = whole_parameters(model)
        found[name] = [n for n in expected if not torch.equal(whole[n], expected[n])]
        if "fsdp" in name and report.read_bytes > 0.7 * total:
            found[name].append(f"read {report.read_bytes} of {total} bytes")
        if not report.read_bytes and name == "plain":
            found[name].append("read nothing")
    model = layouts.build("fsdp2", seed=1)
    before = [part.clone() for *_, part in live_parts(Live.of(model).state)]
    with pytest.raises(MismatchError, match=r"first\.weight: shape"):
        load(model, damaged)
    after = [part for *_, part in live_parts(Live.of(model).state)]
    found["refused"] = [
        "changed" for a, b in zip(before, after, strict=True) if not torch.equal(a, b)
    ]
    found["meta"] = load_meta(layouts, source)
    return found


def load_meta(layouts: Layouts, source: str) -> list[str]:
    """Load a model that was built and sharded without memory."""
    with torch.device("meta"):
        net = Net(1)
    model = layouts.fsdp2(net, layouts.line)
    load(model, source)
    expected, wrong = parameters_of(0), []
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor) or parameter.is_meta:
            wrong.append(f"{name} is {type(parameter)}")
        elif not torch.equal(parameter.full_tensor(), expected[name]):
            wrong.append(name)
    model(torch.ones(2, 5)).backward()
    return wrong


def test_files_load_into_every_layout(tmp_path: Path) -> None:
    """To the bit, each rank reading its part; what does not fit changes nothing on any rank."""
    source = write_files(tmp_path / "hf", Net(0).state_dict(), 2)
    damaged = write_files(
        tmp_path / "damaged", {**Net(0).state_dict(), "first.weight": torch.zeros(2, 2)}
    )
    results = run_ranks(load_everywhere, WORLD_SIZE, str(source), str(damaged))
    for value in results.values:
        assert value == {name: [] for name in (*LOADED, "refused", "meta")}


EXPORTED = [
    "plain",
    "fsdp2",
    "hsdp",
    "tp-fsdp2",
    "fsdp1-FULL_SHARD-orig",
    "fsdp1-HYBRID_SHARD-flat",
]
MANY_FILES = ExportOptions(max_shard_bytes=300, num_writers=3)


def fail_to_write(*args: Any) -> None:
    raise StorageError("no space left")


def export_everything(out: str) -> str:
    """Export every layout; on each rank. Return what a rank that cannot write makes of it."""
    layouts = Layouts()
    exporting.WINDOW_BYTES = 128
    for name in EXPORTED:
        model = layouts.build(name, seed=0)
        before = [part.clone() for *_, part in live_parts(Live.of(model).state)]
        export(model, f"{out}/{name}", options=MANY_FILES)
        after = [part for *_, part in live_parts(Live.of(model).state)]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        put_together = whole_parameters(model)
        assert put_together.keys() == dict(Net(0).named_parameters()).keys()
    half = ExportOptions(dtype=torch.bfloat16)
    export(layouts.build("fsdp2", seed=0), f"{out}/half", options=half)
    if dist.get_rank() == 1:
        exporting.InOrderWriter = fail_to_write  # type: ignore[assignment, misc]
    with pytest.raises(StorageError) as caught:
        export(layouts.build("fsdp2", seed=0), f"{out}/failed", options=MANY_FILES)
    return str(caught.value)


def test_every_layout_exports_the_same_files(tmp_path: Path) -> None:
    """As one process does; several ranks write, and one that fails fails all of them, leaving nothing."""
    values = run_ranks(export_everything, WORLD_SIZE, str(tmp_path)).values
    assert values == ["no space left"] * WORLD_SIZE
    export(Net(0), tmp_path / "expected", options=MANY_FILES)
    for name in EXPORTED:
        assert_equal(read(tmp_path / name), Net(0).state_dict())
        if "fsdp1" not in name:  # its tensors come unit by unit
            assert contents(tmp_path / name) == contents(tmp_path / "expected")
    halved = {
        n: t.to(torch.bfloat16) if t.is_floating_point() else t
        for n, t in Net(0).state_dict().items()
    }
    assert_equal(read(tmp_path / "half"), halved)
    assert [p for p in (tmp_path / "failed").rglob("*") if p.is_file()] == []


def start_resharded(root: str, num_steps: int) -> tuple[list[str], Any, Any]:
    """Restore on as many ranks as the checkpoint is for, and train on."""
    live = Live.of(Layouts().build("fsdp2", seed=1))
    with CheckpointManager(root, live.state) as manager:
        report = manager.restore()
    streams = random_bits()
    live.step()
    wrong = differences(live, reference(num_steps + 1))
    return wrong, report.derived, (dist.get_rank(), streams)


def test_more_ranks_start_from_a_resharded_checkpoint(tmp_path: Path) -> None:
    """They go on to the bit; ranks that did not exist get random streams of their own."""
    live = Live.of(Net(0))
    for _ in range(2):
        live.step()
    with CheckpointManager(tmp_path / "run", live.state) as manager:
        manager.save(mode="sync")
        saved = random_bits()
    reshard(tmp_path / "run", tmp_path / "out", world_size=2)
    first, second = run_ranks(start_resharded, 2, str(tmp_path / "out"), 2).values
    assert first[0] == second[0] == []
    assert (first[1], second[1]) == ((), ("rng",))
    assert first[2] == (0, saved)
    assert second[2][1] != saved
