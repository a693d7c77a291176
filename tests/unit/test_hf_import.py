"""A Hugging Face model becomes a checkpoint at step 0, from which a run starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
import torch
from torch import nn

from fsdp_ckpt import (
    AlreadyCommittedError,
    CheckpointManager,
    CorruptCheckpointError,
    MismatchError,
    TrainState,
)
from fsdp_ckpt.cli import main
from fsdp_ckpt.commit.checkpoint import Checkpoint
from fsdp_ckpt.hf import import_model
from fsdp_ckpt.hf.consolidate import consolidate
from fsdp_ckpt.storage.open import open_store
from tests.hf_files import different_kinds, write_files
from tests.weights import Kinds, assert_equal, contents, load, save

FRESH = ["optimizer.*", "lr_scheduler", "rng"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    return write_files(tmp_path / "hf", Kinds().tensors(), 2)


def saved_model() -> Kinds:
    torch.manual_seed(0)
    return Kinds()


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_run_starts_from_it(tmp_path: Path, source: Path, world_size: int) -> None:
    """Weights are the files' to the bit; what they lack starts fresh, and only when that is allowed."""
    report = import_model(source, tmp_path / "run", world_size=world_size)
    assert (report.world_size, report.num_tensors) == (world_size, len(saved_model().tensors()))
    model = different_kinds()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    state = TrainState(model=model, optimizer=optimizer, lr_scheduler=scheduler)
    state.progress.step = 7
    with CheckpointManager(tmp_path / "run", state) as manager:
        with pytest.raises(MismatchError, match="optimizer"):
            manager.restore()
        restored = manager.restore(allow_missing=FRESH)
        assert (restored.step, state.progress.step) == (0, 0)
        assert set(restored.preserved) == {"model", "progress"}
        assert_equal(model.state_dict(), saved_model().state_dict())
        assert optimizer.state_dict()["state"] == {}
        sum(p.float().square().sum() for p in model.parameters()).backward()
        optimizer.step()
        state.progress.advance()
        manager.save(mode="sync")
        assert [info.step for info in manager.checkpoints()] == [1, 0]


def test_it_is_what_a_save_would_have_written(tmp_path: Path, source: Path) -> None:
    """The same tensors in the same places as a save of that model alone, and it verifies."""
    report = import_model(source, tmp_path / "run")
    ours = Checkpoint.open(open_store(report.output))
    theirs = Checkpoint.open(open_store(save(tmp_path / "other", saved_model(), step=0)))
    assert {r.name: (r.dtype, r.shape) for r in ours.manifest.tensors} == {
        r.name: (r.dtype, r.shape) for r in theirs.manifest.tensors
    }
    assert ours.manifest.inline == theirs.manifest.inline
    assert {p: v for p, v in theirs.manifest.values.items() if p[0] == "progress"} == dict(
        ours.manifest.values
    )
    assert main(["verify", str(tmp_path / "run")]) == 0


@pytest.mark.parametrize("world_size", [1, 5])
def test_a_round_trip_gives_the_same_weights(tmp_path: Path, source: Path, world_size: int) -> None:
    """Imported and consolidated, every tensor is as it was."""
    import_model(source, tmp_path / "run", world_size=world_size)
    consolidate(tmp_path / "run", tmp_path / "out")
    assert_equal(load(tmp_path / "out"), saved_model().tensors())


def test_windows_may_be_small(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor larger than the buffer is read and written part by part."""
    from fsdp_ckpt.hf import shard_files

    big = nn.ParameterDict({"big": torch.arange(2_500_000.0).view(50, 50_000)})
    files = write_files(tmp_path / "big", big.state_dict())
    monkeypatch.setattr(shard_files, "WINDOW_BYTES", shard_files.BLOCK_BYTES)
    report = import_model(files, tmp_path / "run", world_size=2)
    assert main(["verify", report.output]) == 0
    model = nn.ParameterDict({"big": torch.zeros(50, 50_000)})
    with CheckpointManager(tmp_path / "run", TrainState(model=model)) as manager:
        manager.restore(allow_missing=["rng"])
    assert torch.equal(model["big"], big["big"])


def test_stores_that_take_bytes_in_order_get_the_same_files(tmp_path: Path, source: Path) -> None:
    """The header comes first there, by a second pass over the source."""
    import_model(source, tmp_path / "run", world_size=2)
    remote = fsspec.filesystem("memory")
    try:
        import_model(source, "memory://hf-import-test", world_size=2)
        found = Checkpoint.open(open_store("memory://hf-import-test/step-000000000"))
        local = Checkpoint.open(open_store(tmp_path / "run" / "step-000000000"))
        for rank in range(2):
            assert found.header(rank).digests == local.header(rank).digests
            assert found.header(rank).layout == local.header(rank).layout
        assert main(["verify", "memory://hf-import-test"]) == 0
    finally:
        remote.rm("/hf-import-test", recursive=True)


def test_a_root_with_a_run_is_refused(tmp_path: Path, source: Path) -> None:
    """A restore would take the run's newest instead."""
    save(tmp_path / "run", Kinds(), step=5)
    before = sorted(p.name for p in (tmp_path / "run").rglob("*"))
    with pytest.raises(AlreadyCommittedError, match="step 5"):
        import_model(source, tmp_path / "run")
    assert sorted(p.name for p in (tmp_path / "run").rglob("*")) == before


def test_a_damaged_source_publishes_nothing(tmp_path: Path, source: Path) -> None:
    """No checkpoint, and no file of a dead attempt, is left."""
    path = source / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptCheckpointError, match="model-00002"):
        import_model(source, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_command_imports(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As text or JSON; the source stays as it is."""
    before = contents(source)
    argv = ["import", str(source), str(tmp_path / "run"), "--world-size", "2", "--threads", "1"]
    assert main([*argv, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["world_size"], document["output"]) == (
        2,
        str(tmp_path / "run" / "step-000000000"),
    )
    assert main(argv) == 1
    assert "name a new root" in capsys.readouterr().err
    assert main(["import", str(source), str(tmp_path / "run2")]) == 0
    assert "for 1 rank(s)" in capsys.readouterr().out
    assert contents(source) == before


def test_the_commands_need_no_torch(tmp_path: Path, source: Path) -> None:
    """Import and reshard work where torch is not installed."""
    script = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from fsdp_ckpt.cli import main\n"
        "source, run, out = sys.argv[1:]\n"
        "assert main(['import', source, run]) == 0\n"
        "assert main(['reshard', run, out, '--world-size', '2']) == 0\n"
    )
    argv = [sys.executable, "-c", script, *map(str, (source, tmp_path / "run", tmp_path / "out"))]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    "argv",
    [["import", "x"], ["import", "x", "y", "--world-size", "0"], ["reshard", "x", "y"]],
)
def test_wrong_usage_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """As argparse does it."""
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert "usage: fsdp-ckpt" in capsys.readouterr().err
