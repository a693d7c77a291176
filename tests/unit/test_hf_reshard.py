"""A checkpoint is rewritten for another number of ranks, and stays the same state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_ckpt import (
    AlreadyCommittedError,
    CheckpointManager,
    CorruptCheckpointError,
    MismatchError,
    NotFoundError,
    ShardedStorageWriter,
    ShardSavePlanner,
)
from fsdp_ckpt.cli import main
from fsdp_ckpt.commit.checkpoint import Checkpoint
from fsdp_ckpt.dcp.agreement import agree
from fsdp_ckpt.dcp.summary import Summary
from fsdp_ckpt.hf import reshard
from fsdp_ckpt.plan.layouts import MeshLayout
from fsdp_ckpt.state.rank_local import RankLocal
from fsdp_ckpt.storage.open import open_store
from tests.layouts import Live, Net, differences, reference, spoil
from tests.weights import DAMAGES, contents

Capture = pytest.CaptureFixture[str]


def save_trained(root: Path, num_steps: int = 2) -> Path:
    """Save a model after some steps, from one process; return the checkpoint's folder."""
    live = Live.of(Net(0))
    for _ in range(num_steps):
        live.step()
    with CheckpointManager(root, live.state) as manager:
        return Path(manager.save(mode="sync").wait().url)


def save_as_ranks(folder: Path, states: list[dict[str, Any]], step: int = 3) -> Checkpoint:
    """Save what so many ranks hold, one after the other in this process."""
    writer = ShardedStorageWriter(folder, step=step)
    planners = [ShardSavePlanner() for _ in states]
    for rank, (planner, state) in enumerate(zip(planners, states, strict=True)):
        planner.set_up(state, rank=rank, world_size=len(states))
    agreement = agree([Summary.from_json(p.summary().to_json()) for p in planners])
    attempt = writer.open_attempt(len(states))
    receipts = []
    for rank, planner in enumerate(planners):
        planner.accept(agreement, rank, len(states))
        draft = planner.draft_manifest() if rank == 0 else None
        receipts.append(writer.write_contents(planner.contents(), attempt, rank, draft))
    writer.publish(planners[0].draft_manifest(), attempt, receipts)
    return Checkpoint.open(writer.store)


def rank_state(rank: int, **others: Any) -> dict[str, Any]:
    """What a rank of a data-parallel job holds: equal weights, random states of its own."""
    model = {"weight": torch.arange(12.0).view(6, 2), "seen": torch.tensor(5)}
    rng = {"torch": torch.full((4,), rank), "python": (rank, "state")}
    return {"model": model, "rng": RankLocal(rng), **others}


def opened(report: Any) -> Checkpoint:
    return Checkpoint.open(open_store(report.output))


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_the_state_is_the_same(tmp_path: Path, world_size: int) -> None:
    """Model, optimizer and progress restore to the bit; every digest holds; the source is unchanged."""
    folder = save_trained(tmp_path / "run")
    before = {p.name: contents(p) for p in folder.iterdir() if p.is_dir()}
    report = reshard(tmp_path / "run", tmp_path / "out", world_size=world_size)
    assert (report.saved_world_size, report.world_size, report.step) == (1, world_size, 2)
    assert main(["verify", str(tmp_path / "out")]) == 0
    live = Live.of(Net(1))
    spoil(live)
    with CheckpointManager(tmp_path / "out", live.state) as manager:
        assert manager.restore().step == 2
    assert differences(live, reference(2)) == []
    assert {p.name: contents(p) for p in folder.iterdir() if p.is_dir()} == before


def test_each_rank_finds_all_of_its_own_in_its_file(tmp_path: Path) -> None:
    """What FSDP2 gives a rank is in that rank's file; of the rest the bytes are balanced."""
    save_trained(tmp_path / "run")
    checkpoint = opened(reshard(tmp_path / "run", tmp_path / "out", world_size=3))
    layouts = {row.name: row.layout for row in checkpoint.manifest.tensors}
    cut = MeshLayout.__name__
    assert {type(layout).__name__ for layout in layouts.values()} == {cut}
    sharded = [row for row in checkpoint.manifest.tensors if str(row.layout.placements[0]) == "S0"]
    assert {"model.first.weight", "optimizer.state.first.weight.exp_avg"} <= {
        r.name for r in sharded
    }
    assert {"model.seen", "model.mask"}.isdisjoint(row.name for row in sharded)
    for row in sharded:
        for rank in range(3):
            for box in row.layout.boxes_of(row.shape, rank):
                assert [piece.rank for piece in checkpoint.file_pieces(row, box)] == [rank]
    sizes = [
        sum(e.num_bytes for e in header.layout.entries if e.name not in header.own)
        for header in map(checkpoint.header, range(3))
    ]
    assert max(sizes) < 2 * min(sizes)


def test_back_and_forth_gives_the_same_bytes(tmp_path: Path) -> None:
    """Any way to a number of ranks leads to the same data."""
    save_trained(tmp_path / "run")
    reshard(tmp_path / "run", tmp_path / "three", world_size=3)
    direct = opened(reshard(tmp_path / "run", tmp_path / "two", world_size=2))
    around = opened(reshard(tmp_path / "three", tmp_path / "two-again", world_size=2))
    for rank in range(2):
        assert around.header(rank).digests == direct.header(rank).digests


def test_ranks_keep_their_random_states(tmp_path: Path) -> None:
    """Those that existed; others have none, and those that are no more are named."""
    save_as_ranks(tmp_path / "saved", [rank_state(r) for r in range(3)])
    fewer = reshard(tmp_path / "saved", tmp_path / "two", world_size=2)
    assert fewer.dropped == ("rng of ranks 2 to 2",)
    more = reshard(tmp_path / "saved", tmp_path / "five", world_size=5)
    assert more.dropped == ()
    for report, world_size in ((fewer, 2), (more, 5)):
        found = opened(report)
        manifest = found.manifest
        declared = manifest.rank_local if world_size == 2 else manifest.partial
        assert {path[:2] for path in declared} == {("rng", "torch"), ("rng", "python")}
        for rank in range(world_size):
            header = found.header(rank)
            if rank < 3:
                piece = found.own_piece(rank, "rng.torch")
                assert piece is not None
                values = found.read([piece]).array(piece).view("<i8")
                assert values.flatten().tolist() == [rank] * 4
                assert header.values[("rng", "python")] == {"$": "tuple", "v": [rank, "state"]}
            else:
                assert (header.own, dict(header.values)) == (frozenset(), {})


def test_what_differs_per_rank_is_refused_or_left_out(tmp_path: Path) -> None:
    """A part's per-rank states are not ours to share out; buffers come from the lowest rank."""
    states = [
        rank_state(rank, data=RankLocal({"cursor": rank}), progress={"step": 3})
        for rank in range(2)
    ]
    states[1]["model"]["seen"] = torch.tensor(9)
    save_as_ranks(tmp_path / "saved", states)
    with pytest.raises(MismatchError, match=r"data\.cursor: each of 2 ranks has its own"):
        reshard(tmp_path / "saved", tmp_path / "out", world_size=3)
    assert not (tmp_path / "out").exists()
    report = reshard(tmp_path / "saved", tmp_path / "out", world_size=3, drop=["data"])
    assert (report.derived, report.dropped) == (("model.seen",), ("data.cursor",))
    found = opened(report)
    assert found.manifest.varying == ()
    (piece,) = found.file_pieces(found.rows["model.seen"], whole(found, "model.seen"))
    assert found.read([piece]).array(piece).view("<i8").item() == 5


def whole(checkpoint: Checkpoint, name: str) -> Any:
    from fsdp_ckpt.plan.box import Box

    return Box.whole(checkpoint.rows[name].shape)


def test_the_same_number_of_ranks_loses_nothing(tmp_path: Path) -> None:
    """Every rank's own states and differing tensors stay its own."""
    states = [rank_state(rank, data=RankLocal({"cursor": rank})) for rank in range(2)]
    states[1]["model"]["seen"] = torch.tensor(9)
    source = save_as_ranks(tmp_path / "saved", states)
    report = reshard(tmp_path / "saved", tmp_path / "out", world_size=2)
    assert (report.derived, report.dropped) == ((), ())
    found = opened(report)
    assert found.manifest.varying == source.manifest.varying == (("model", "seen"),)
    assert set(found.manifest.rank_local) == set(source.manifest.rank_local)
    for rank in range(2):
        assert found.header(rank).own == source.header(rank).own
        assert found.header(rank).values == source.header(rank).values
    piece = found.own_piece(1, "model.seen")
    assert piece is not None
    assert found.read([piece]).array(piece).view("<i8").item() == 9


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_source_publishes_nothing(tmp_path: Path, kind: str) -> None:
    """By name, and without leaving a file."""
    folder = save_trained(tmp_path / "run")
    (path,) = folder.glob("*/rank-*.safetensors")
    DAMAGES[kind](path)
    with pytest.raises(CorruptCheckpointError, match=path.name):
        reshard(folder, tmp_path / "out", world_size=2)
    assert list((tmp_path / "out").rglob("*.safetensors")) == []
    assert list((tmp_path / "out").rglob("manifest.json")) == []


def test_a_step_that_is_there_is_not_replaced(tmp_path: Path) -> None:
    """The source's own root included; nothing there is an error too."""
    save_trained(tmp_path / "run")
    with pytest.raises(AlreadyCommittedError):
        reshard(tmp_path / "run", tmp_path / "run", world_size=2)
    with pytest.raises(NotFoundError):
        reshard(tmp_path / "nowhere", tmp_path / "out", world_size=2)
    with pytest.raises(ValueError, match="1 or more"):
        reshard(tmp_path / "run", tmp_path / "out", world_size=0)


def test_the_command_reshards(tmp_path: Path, capsys: Capture) -> None:
    """As text or JSON; what is left out is a warning."""
    save_trained(tmp_path / "run")
    argv = ["reshard", str(tmp_path / "run"), str(tmp_path / "out"), "--world-size", "2"]
    assert main([*argv, "--json", "--drop", "optimizer"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["world_size"] == 2
    assert "warning: optimizer.state.first.weight.exp_avg: left out" in captured.err
    assert main(["reshard", str(tmp_path / "run"), str(tmp_path / "b"), "--world-size", "3"]) == 0
    assert "from 1 to 3 rank(s)" in capsys.readouterr().out
