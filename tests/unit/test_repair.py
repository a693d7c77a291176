"""What is brought back: complete attempts without a manifest, or with a damaged one; and nothing else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from fsdp_ckpt import (
    CheckpointManager,
    NotFoundError,
    ReshardLoadPlanner,
    ShardedStorageReader,
    ShardedStorageWriter,
    StorageError,
    TrainState,
)
from fsdp_ckpt.cli import main
from fsdp_ckpt.commit.catalog import CheckpointInfo, find_checkpoints, step_folder
from fsdp_ckpt.commit.marks import add_mark
from fsdp_ckpt.commit.repair import RepairOptions, repair_root, repair_step
from fsdp_ckpt.storage.local import LocalStore
from fsdp_ckpt.storage.open import open_store
from fsdp_ckpt.testing import Fault, FaultPlan, FaultStore
from tests.bits import live_bits
from tests.roots import attempt_at, put_checkpoint, tree
from tests.unit.test_hf_reshard import save_trained
from tests.weights import flip_byte

Capture = pytest.CaptureFixture[str]


def repaired(capsys: Capture, *argv: object) -> tuple[int, list[dict[str, Any]]]:
    """Run ``repair --json``; return exit code and steps."""
    code = main(["repair", *map(str, argv), "--json"])
    return code, json.loads(capsys.readouterr().out)["steps"]


def files(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def manifest_of(root: Path, step: int) -> Path:
    return root / step_folder(step) / "manifest.json"


def shard_of(root: Path, step: int, rank: int = 0) -> Path:
    return next((root / step_folder(step)).glob(f"*/rank-{rank:05d}-*.safetensors"))


def lose(manifest: Path) -> None:
    manifest.unlink()


def tear(manifest: Path) -> None:
    manifest.write_bytes(manifest.read_bytes()[:-20])


def scramble(manifest: Path) -> None:
    data = bytearray(manifest.read_bytes())
    data[len(data) // 2] ^= 1
    manifest.write_bytes(data)


def blank(manifest: Path) -> None:
    manifest.write_bytes(b"")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two checkpoints of two ranks."""
    store = open_store(tmp_path / "run")
    put_checkpoint(store, 1)
    put_checkpoint(store, 2)
    return tmp_path / "run"


@pytest.mark.parametrize("damage", [lose, tear, scramble, blank])
def test_what_is_repaired_restores_to_the_bit(
    tmp_path: Path, capsys: Capture, damage: Callable[[Path], None]
) -> None:
    """Model, optimizer and progress; and verify finds nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    state = TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    state.optimizer.step()
    state.progress.step = 7
    with CheckpointManager(tmp_path, state) as manager:
        manager.save(mode="sync")
    expected = live_bits(model, state.optimizer, progress=state.progress)
    damage(manifest_of(tmp_path, 7))
    code, steps = repaired(capsys, tmp_path)
    assert (code, [s["state"] for s in steps]) == (0, ["repaired"])
    assert main(["verify", str(tmp_path)]) == 0
    again = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    fresh = TrainState(model=again, optimizer=torch.optim.AdamW(again.parameters()))
    with CheckpointManager(tmp_path, fresh) as manager:
        assert manager.restore().step == 7
    assert live_bits(again, fresh.optimizer, progress=fresh.progress) == expected


def test_what_is_whole_is_not_touched(root: Path, capsys: Capture) -> None:
    """Not a byte, beside one that is brought back."""
    before = files(root)
    code, steps = repaired(capsys, root)
    assert (code, [(s["step"], s["state"]) for s in steps]) == (0, [(2, "whole"), (1, "whole")])
    assert files(root) == before
    lose(manifest_of(root, 1))
    assert repaired(capsys, root)[0] == 0
    assert files(root).keys() == before.keys()
    newest = {
        name: content for name, content in before.items() if name.startswith("step-000000002")
    }
    assert newest.items() <= files(root).items()


@pytest.mark.parametrize("damage", [lose, tear])
def test_a_dry_run_changes_nothing(
    root: Path, capsys: Capture, damage: Callable[[Path], None]
) -> None:
    """It says what would be done, and that not all is well."""
    damage(manifest_of(root, 2))
    before = files(root)
    code, steps = repaired(capsys, root, "--dry-run")
    assert (code, [s["state"] for s in steps]) == (1, ["repairable", "whole"])
    assert files(root) == before
    assert repaired(capsys, root)[0] == 0
    assert main(["ls", str(root)]) == 0


def test_the_document_has_the_fields_that_are_written_down(root: Path, capsys: Capture) -> None:
    """Every field stands in docs/commands.md."""
    text = (Path(__file__).parents[2] / "docs" / "commands.md").read_text()
    section = text[text.index("## `repair") :]
    assert main(["repair", str(root), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    for name in (*document, *document["steps"][0]):
        assert f"`{name}`" in section or f" {name}" in section or f"{{{name}" in section, name


def test_a_damaged_manifest_is_kept_aside(root: Path, capsys: Capture) -> None:
    """For whoever wants to look into the damage."""
    manifest = manifest_of(root, 2)
    whole = manifest.read_bytes()
    tear(manifest)
    torn = manifest.read_bytes()
    repaired(capsys, root, "--step", 2)
    (kept,) = manifest.parent.glob("damaged-*.json")
    assert kept.read_bytes() == torn
    # Nothing of it was lost but what it says about the version that wrote it.
    found, expected = json.loads(manifest.read_bytes()), json.loads(whole)
    assert {k: v for k, v in found.items() if k != "digest"} == {
        k: v for k, v in expected.items() if k != "digest"
    }


def drop_rank(root: Path) -> None:
    shard_of(root, 2, 1).unlink()


def drop_coordinator(root: Path) -> None:
    shard_of(root, 2, 0).unlink()


def truncate(root: Path) -> None:
    shard = shard_of(root, 2, 1)
    shard.write_bytes(shard.read_bytes()[:-1])


def flip(root: Path) -> None:
    flip_byte(shard_of(root, 2, 1), of_data=1)


def flip_header(root: Path) -> None:
    flip_byte(shard_of(root, 2, 1), of_header=20)


def drop_all(root: Path) -> None:
    shutil.rmtree(shard_of(root, 2).parent)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (drop_rank, "the file of rank 1 is not there"),
        (drop_coordinator, "the file of rank 0 is not there"),
        (truncate, "it is not whole"),
        (flip, "holds w"),
        (flip_header, "malformed shard header"),
        (drop_all, "no shard files"),
    ],
)
@pytest.mark.parametrize("manifest_damage", [lose, tear])
def test_what_is_missing_is_named(
    root: Path,
    capsys: Capture,
    damage: Callable[[Path], None],
    named: str,
    manifest_damage: Callable[[Path], None],
) -> None:
    """Nothing is published or put aside, in one line per attempt; the rest of the root is as it was."""
    damage(root)
    manifest_damage(manifest_of(root, 2))
    before = files(root)
    code, steps = repaired(capsys, root)
    assert (code, [s["state"] for s in steps]) == (1, ["beyond", "whole"])
    assert any(named.replace("holds", "hold") in reason for reason in steps[0]["reasons"])
    assert not any("\n" in reason for reason in steps[0]["reasons"])
    assert files(root) == before
    assert main(["repair", str(root)]) == 1
    captured = capsys.readouterr()
    assert "step 2: CANNOT BE REPAIRED" in captured.out
    assert captured.out.endswith("1 whole, 1 cannot be repaired\n")
    assert captured.err.startswith("fsdp-ckpt: error: ")
    assert captured.err.count("\n") == 1


def test_without_reading_the_data_headers_are_enough(root: Path, capsys: Capture) -> None:
    """--fast: a flipped byte is then for verify to find; a mark that says so is believed."""
    flip(root)
    lose(manifest_of(root, 2))
    store = open_store(root)
    add_mark(store, 2, attempt_at(2 / 3600), "corrupt")
    code, steps = repaired(capsys, root, "--fast")
    assert (code, "found its data damaged" in steps[0]["reasons"][1]) == (1, True)
    next((root / step_folder(2)).glob("corrupt-*")).unlink()
    assert repaired(capsys, root, "--fast")[0] == 0
    assert main(["verify", str(root)]) == 1


@pytest.mark.parametrize("damage", [drop_rank, truncate, flip_header, flip])
def test_a_manifest_that_is_there_stays(
    root: Path, capsys: Capture, damage: Callable[[Path], None]
) -> None:
    """Files that are missing or short are named; what only reading tells is left to verify."""
    damage(root)
    before = files(root)
    code, steps = repaired(capsys, root)
    is_seen = damage in (drop_rank, truncate)
    assert (code, steps[0]["state"]) == ((1, "beyond") if is_seen else (0, "whole"))
    assert not is_seen or "rank 1" in steps[0]["reasons"][0]
    assert files(root) == before


def test_attempts_that_another_job_has_followed(tmp_path: Path, capsys: Capture) -> None:
    """Not published, unless a mark or the damaged manifest says that they were checkpoints before."""
    store = open_store(tmp_path)
    for step in (1, 2, 3):
        put_checkpoint(store, step, publish=step != 3)
    put_checkpoint(store, 4, attempt=attempt_at(1))
    store.create(f"resumed-{attempt_at(1)}.json", b"{}")
    lose(manifest_of(tmp_path, 1))
    tear(manifest_of(tmp_path, 2))
    code, steps = repaired(capsys, tmp_path)
    found = {s["step"]: s["state"] for s in steps}
    assert (code, found) == (1, {4: "whole", 3: "beyond", 2: "repaired", 1: "beyond"})
    assert "another job has gone on since" in steps[1]["reasons"][1]
    add_mark(store, 1, attempt_at(1 / 3600), "good")
    assert repaired(capsys, tmp_path, "--step", 1)[1][0]["state"] == "repaired"
    with pytest.raises(NotFoundError):
        repair_step(store, 5, RepairOptions())


def test_what_was_to_be_deleted_stays_so(root: Path, capsys: Capture) -> None:
    """An attempt whose deletion has begun, or of a branch that the run has left."""
    store = open_store(root)
    lose(manifest_of(root, 2))
    add_mark(store, 2, attempt_at(2 / 3600), "pruned")
    code, steps = repaired(capsys, root)
    assert (code, "its deletion has begun" in steps[0]["reasons"][1]) == (1, True)


def test_of_several_attempts_the_newest_complete_one(tmp_path: Path, capsys: Capture) -> None:
    """As a restore does it; but where the damaged manifest names one, that one and no other."""
    store = open_store(tmp_path)
    put_checkpoint(store, 1, attempt=attempt_at(1))
    put_checkpoint(store, 1, attempt=attempt_at(2), publish=False)
    put_checkpoint(store, 1, attempt=attempt_at(3), publish=False, ranks=[0])
    tear(manifest_of(tmp_path, 1))
    assert repaired(capsys, tmp_path)[1][0]["attempt"] == attempt_at(1)
    lose(manifest_of(tmp_path, 1))
    assert repaired(capsys, tmp_path)[1][0]["attempt"] == attempt_at(2)
    tear(manifest_of(tmp_path, 1))
    for shard in (tmp_path / step_folder(1) / attempt_at(2)).iterdir():
        shard.unlink()
    code, steps = repaired(capsys, tmp_path)
    assert (code, steps[0]["state"]) == (1, "beyond")


FAILING: tuple[Literal["fail", "lose_answer"], ...] = ("fail", "lose_answer")


@pytest.mark.parametrize("kind", FAILING)
@pytest.mark.parametrize(("damage", "num_changes"), [(lose, 1), (tear, 3)])
def test_a_repair_that_dies_can_be_made_again(
    tmp_path: Path,
    damage: Callable[[Path], None],
    num_changes: int,
    kind: Literal["fail", "lose_answer"],
) -> None:
    """From each of its changes on, as a crash: the checkpoint is there or not, never half, and never lost."""
    for nth in range(1, num_changes + 1):
        root = tmp_path / str(nth)
        store = open_store(root)
        put_checkpoint(store, 1)
        put_checkpoint(store, 2)
        damage(manifest_of(root, 2))
        # A store's error ends a repair, as the death of its process does: nothing that comes later happens.
        with FaultPlan(Fault(kind, nth=nth)) as plan, suppress(StorageError):
            list(repair_root(FaultStore(store, plan), RepairOptions()))
        assert plan.fired() == 1
        found = [f for f in find_checkpoints(store) if isinstance(f, CheckpointInfo)]
        assert [f.step for f in found][-1] == 1
        assert all(s.state in ("repaired", "whole") for s in repair_root(store, RepairOptions()))
        assert main(["verify", str(root), "--step", "2"]) == 0
        assert not [name for name in tree(store) if name.endswith((".tmp", ".claim"))]


def test_a_folder_is_one_of_its_run(root: Path, capsys: Capture, monkeypatch: Any) -> None:
    """A step's folder named itself follows the run's fences; a path may be relative."""
    store = open_store(root)
    lose(manifest_of(root, 2))
    store.create(f"resumed-{attempt_at(1)}.json", b"{}")
    folder = root / step_folder(2)
    monkeypatch.chdir(folder)
    for name in (folder, "."):
        code, steps = repaired(capsys, name)
        assert (code, steps[0]["step"], steps[0]["state"]) == (1, 2, "beyond")
    (root / f"resumed-{attempt_at(1)}.json").unlink()
    assert repaired(capsys, ".")[1][0]["state"] == "repaired"


def test_on_any_store(capsys: Capture) -> None:
    """A URL that fsspec knows: diff, plan and repair of what is in memory."""
    url = "memory://test-repair-on-any-store"
    store = open_store(url)
    for step in (1, 2):
        put_checkpoint(store, step)
    assert main(["diff", f"{url}/{step_folder(1)}", f"{url}/{step_folder(2)}", "--json"]) == 1
    (tensor,) = json.loads(capsys.readouterr().out)["tensors"]
    assert (tensor["name"], tensor["max_abs"], tensor["num_differing"]) == ("w", 1, 2)
    assert main(["plan", url, "--world-size", "3"]) == 0
    capsys.readouterr()
    for target in (url, f"{url}/{step_folder(2)}"):
        store.child(step_folder(2)).delete("manifest.json")
        code, steps = repaired(capsys, target)
        assert (code, steps[0]["step"], steps[0]["state"]) == (0, 2, "repaired")


def test_plain_dcp_checkpoints_are_rebuilt_from_their_entries(
    tmp_path: Path, capsys: Capture
) -> None:
    """DCP's own planner leaves no spare of the manifest; what covers all tensors is enough."""
    state = {"weight": torch.arange(12.0).view(3, 4), "nested": {"step": 5, "name": ("a", None)}}
    folder = tmp_path / "plain"
    dcp.save(state, storage_writer=ShardedStorageWriter(folder), no_dist=True)
    lose(folder / "manifest.json")
    assert repaired(capsys, folder)[0] == 0
    assert main(["verify", str(folder)]) == 0
    found: dict[str, Any] = {"weight": torch.zeros(3, 4), "nested": {"step": 0, "name": None}}
    dcp.load(
        found,
        storage_reader=ShardedStorageReader(folder),
        planner=ReshardLoadPlanner(),
        no_dist=True,
    )
    assert torch.equal(found["weight"], state["weight"])  # type: ignore[arg-type]
    assert found["nested"] == state["nested"]


@pytest.mark.parametrize("name", ["empty", "nowhere"])
def test_nothing_there_is_an_error(tmp_path: Path, capsys: Capture, name: str) -> None:
    """One line, exit code 1."""
    (tmp_path / "empty").mkdir()
    assert main(["repair", str(tmp_path / name)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("fsdp-ckpt: error: ")
    assert captured.err.count("\n") == 1


def test_a_store_that_cannot_be_read_is_an_error(
    root: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not damage: nothing is put aside."""
    tear(manifest_of(root, 2))
    before = files(root)

    def unreachable(self: LocalStore, key: str, byte_offset: int, buffer: memoryview) -> None:
        raise StorageError(f"{key}: 503", retryable=True)

    monkeypatch.setattr(LocalStore, "read_into", unreachable)
    assert main(["repair", str(root)]) == 1
    assert capsys.readouterr().err.startswith("fsdp-ckpt: error: ")
    assert files(root) == before


def test_a_trained_checkpoint_and_its_repair_are_the_same(tmp_path: Path, capsys: Capture) -> None:
    """diff finds nothing between a checkpoint and one that was brought back."""
    folder = save_trained(tmp_path / "a")
    save_trained(tmp_path / "b")
    lose(folder / "manifest.json")
    assert repaired(capsys, tmp_path / "a")[0] == 0
    what = ["--exclude", "rng.*"]  # two runs of the same numbers
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b"), *what]) == 0
