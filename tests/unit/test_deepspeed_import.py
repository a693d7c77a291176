"""Checkpoints that DeepSpeed wrote become ours: every tensor, the optimizer, counters; without DeepSpeed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import jsonschema
import pytest
import torch
from safetensors.torch import load_file

from fsdp_ckpt import AlreadyCommittedError, CheckpointManager, NotFoundError, TrainState
from fsdp_ckpt.cli import main
from fsdp_ckpt.cli.schema import read_schema
from fsdp_ckpt.commit.checkpoint import Checkpoint
from fsdp_ckpt.deepspeed import import_deepspeed
from fsdp_ckpt.hf.consolidate import consolidate
from fsdp_ckpt.storage.open import open_store
from tests.bits import bits
from tests.deepspeed_files import CLIENT_STATE, EXPECTED, KEPT, RUNS, STEPS, WORLD_SIZE, Net
from tests.weights import load

# What the files do not hold.
FRESH = ["rng"]


class Holder:
    """A schedule, or anything that keeps what it is given."""

    def __init__(self) -> None:
        self.state: Any = None

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def expected(run: str, kind: str) -> dict[str, torch.Tensor]:
    """Return what DeepSpeed itself read: ``model``, ``exp_avg`` or ``exp_avg_sq``."""
    found = load_file(KEPT / run / EXPECTED)
    return {k.removeprefix(f"{kind}/"): t for k, t in found.items() if k.startswith(f"{kind}/")}


@pytest.fixture(params=RUNS)
def run(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_consolidated_it_equals_deepspeeds_own(tmp_path: Path, run: str, world_size: int) -> None:
    """Tensor for tensor, bit for bit; of stage 1 it leaves frozen parameters out, which are here too."""
    import_deepspeed(KEPT / run, tmp_path / "run", world_size=world_size)
    consolidate(tmp_path / "run", tmp_path / "hf")
    found = load(tmp_path / "hf")
    wanted = expected(run, "model")
    for name, tensor in wanted.items():
        if name != "head.weight":  # tied: once in our files
            assert bits(found[name]) == bits(tensor), name
    extra = found.keys() - wanted.keys()
    assert extra == ({"frozen.weight", "frozen.bias"} if RUNS[run][0] == 1 else set())
    assert torch.equal(wanted["head.weight"], wanted["embedding.weight"])


def test_frozen_parameters_are_the_models(tmp_path: Path, run: str) -> None:
    """They never changed, so they are the initial ones, rounded to what the run kept."""
    import_deepspeed(KEPT / run, tmp_path / "run")
    consolidate(tmp_path / "run", tmp_path / "hf")
    found = load(tmp_path / "hf")
    for name in ("frozen.weight", "frozen.bias"):
        assert torch.equal(found[name], Net().get_parameter(name).to(torch.bfloat16))


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_plain_model_goes_on_from_it(tmp_path: Path, run: str, world_size: int) -> None:
    """Weights, moments, steps, hyperparameters, counters, schedule and client state are there."""
    import_deepspeed(KEPT / run, tmp_path / "run", world_size=world_size, widen=True)
    net = Net(seed=1)
    optimizer = torch.optim.AdamW(net.groups(), lr=0.5)
    schedule, client_state = Holder(), Holder()
    state = TrainState(
        model=net,
        optimizer=optimizer,
        lr_scheduler=schedule,
        extra={"client_state": client_state},
    )
    with CheckpointManager(tmp_path / "run", state) as manager:
        assert manager.restore(allow_missing=FRESH).step == STEPS
    assert bits({k: v.float() for k, v in expected(run, "model").items()}) == bits(
        {k: v.float() for k, v in net.state_dict().items() if k in expected(run, "model")}
    )
    names = {id(p): name for name, p in net.named_parameters()}
    for key in ("exp_avg", "exp_avg_sq"):
        moments = {names[id(p)]: s[key] for p, s in optimizer.state.items()}
        assert bits(moments) == bits(expected(run, key))
    assert {float(s["step"]) for s in optimizer.state.values()} == {STEPS}
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
    assert {g["lr"] for g in optimizer.param_groups} != {0.5}
    assert (state.progress.step, state.progress.samples) == (STEPS, 4 * WORLD_SIZE * STEPS)
    assert schedule.state == {"last_batch_iteration": STEPS - 1}
    assert bits(client_state.state) == bits(CLIENT_STATE)


def test_all_stages_of_one_run_give_one_state(tmp_path: Path) -> None:
    """What was trained alike is alike, however it was partitioned."""
    found = []
    for run in RUNS:
        import_deepspeed(KEPT / run, tmp_path / run, world_size=1)
        folder = next((tmp_path / run).glob("step-*"))
        found.append(load_file(next(folder.glob("*/*.safetensors"))))
    assert bits(found[0]) == bits(found[1]) == bits(found[2])


def test_16_bits_stay_or_become_fp32(tmp_path: Path) -> None:
    """Frozen parameters are as an engine has them, or as a model of FP32 does."""
    for widen, dtype in ((False, "BF16"), (True, "F32")):
        import_deepspeed(KEPT / "stage3", tmp_path / dtype, widen=widen)
        rows = Checkpoint.open(open_store(next((tmp_path / dtype).glob("step-*")))).rows
        assert rows["model.frozen.weight"].dtype == dtype
        assert rows["model.linear.weight"].dtype == "F32"
        assert rows["model.seen"].dtype == "I64"


@pytest.fixture
def by_tag(tmp_path: Path) -> Path:
    """A folder with two tags, of which ``latest`` names the second."""
    folder = tmp_path / "ds"
    shutil.copytree(KEPT / "stage3", folder)
    shutil.copytree(KEPT / "stage2" / f"global_step{STEPS}", folder / "other")
    return folder


def test_latest_a_tag_or_its_folder(tmp_path: Path, by_tag: Path) -> None:
    """The folder means what ``latest`` names, unless a tag is given, or is the folder."""
    assert import_deepspeed(by_tag, tmp_path / "a").stage == 3
    assert import_deepspeed(by_tag, tmp_path / "b", tag="other").stage == 2
    assert import_deepspeed(by_tag / "other", tmp_path / "c").stage == 2
    with pytest.raises(NotFoundError, match=r"gone: no files .* folders here: global_step2, other"):
        import_deepspeed(by_tag, tmp_path / "d", tag="gone")
    with pytest.raises(NotFoundError, match="neither a file latest"):
        import_deepspeed(tmp_path / "nothing", tmp_path / "d")


def test_it_needs_a_new_root_and_leaves_the_source(tmp_path: Path) -> None:
    """A second import into a run is refused; DeepSpeed's files are not touched."""
    shutil.copytree(KEPT / "stage2", tmp_path / "ds")
    before = {p: p.read_bytes() for p in (tmp_path / "ds").rglob("*.pt")}
    import_deepspeed(tmp_path / "ds", tmp_path / "run")
    with pytest.raises(AlreadyCommittedError, match="a run is here already"):
        import_deepspeed(tmp_path / "ds", tmp_path / "run")
    assert {p: p.read_bytes() for p in (tmp_path / "ds").rglob("*.pt")} == before


def test_any_store_will_do(tmp_path: Path) -> None:
    """Both sides are URLs."""
    fs = fsspec.filesystem("memory")
    fs.put(str(KEPT / "stage3"), "/deepspeed-import/ds", recursive=True)
    import_deepspeed("memory://deepspeed-import/ds", "memory://deepspeed-import/run")
    import_deepspeed(KEPT / "stage3", tmp_path / "run")
    for root in ("memory://deepspeed-import/run", str(tmp_path / "run")):
        consolidate(root, tmp_path / root.partition(":")[0].strip("/").replace("/", "-"))
    outs = [p for p in tmp_path.iterdir() if p.name != "run"]
    assert bits(load(outs[0])) == bits(load(outs[1]))
    fs.rm("/deepspeed-import", recursive=True)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says what it did; an error is one line, and the exit code 1."""
    source, root = str(KEPT / "stage1"), str(tmp_path / "run")
    assert main(["import-deepspeed", source, root, "--world-size", "3"]) == 0
    assert "from 2 rank(s) of stage 1 to 3 rank(s)" in capsys.readouterr().out
    again = ["import-deepspeed", source, str(tmp_path / "again"), "--json"]
    assert main(again) == 0
    jsonschema.validate(json.loads(capsys.readouterr().out), read_schema("import-deepspeed"))
    assert main(["import-deepspeed", source, root]) == 1
    assert "a run is here already" in capsys.readouterr().err


def test_neither_torch_nor_deepspeed_is_loaded(tmp_path: Path) -> None:
    """The importer works where neither is installed."""
    script = f"""
import sys
from fsdp_ckpt.cli import main
main(["import-deepspeed", {str(KEPT / "stage3")!r}, {str(tmp_path / "run")!r}])
sys.exit("torch" in sys.modules or "deepspeed" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=120).returncode == 0
