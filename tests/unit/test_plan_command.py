"""Whether a checkpoint will load elsewhere, and what of it each rank reads; without ranks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_ckpt import CheckpointManager, MismatchError, ResumableSampler, TrainState
from fsdp_ckpt.cli import main
from fsdp_ckpt.commit.checkpoint import Checkpoint
from fsdp_ckpt.commit.load_cost import load_costs
from fsdp_ckpt.hf import reshard
from fsdp_ckpt.plan.box import Box
from fsdp_ckpt.plan.layouts import FlatLayout, ListedLayout, Mesh, MeshLayout, Placement
from fsdp_ckpt.plan.targets import TargetLayout, target_layouts
from fsdp_ckpt.storage.open import open_store
from tests.hf_files import write_files
from tests.unit.test_hf_reshard import rank_state, save_as_ranks, save_trained
from tests.weights import DAMAGES, Kinds, save

Capture = pytest.CaptureFixture[str]


def planned(capsys: Capture, *argv: object) -> tuple[int, dict[str, Any]]:
    """Run ``plan --json``; return exit code and document."""
    code = main(["plan", *map(str, argv), "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three ranks of FSDP2."""
    folder = tmp_path_factory.mktemp("plan")
    save_trained(folder / "run")
    reshard(folder / "run", folder / "three", world_size=3)
    return folder / "three"


@pytest.mark.parametrize(
    "layout", ["saved", "fsdp", "hsdp:1x4", "hsdp:2x2", "hsdp:4x1", "flat", "ddp"]
)
def test_every_layout_covers_the_state(root: Path, capsys: Capture, layout: str) -> None:
    """What is cut is held once per group of ranks that make up the whole, the rest by every rank."""
    code, document = planned(capsys, root, "--world-size", 4, "--layout", layout)
    assert (code, document["loads"], document["layout"]) == (0, True, layout)
    checkpoint = Checkpoint.open(open_store(root / "step-000000002"))
    rows = checkpoint.manifest.tensors
    cut = sum(r.num_bytes for r in rows if str(r.layout.placements[0]) == "S0")  # type: ignore[union-attr]
    own = sum(
        e.num_bytes
        for rank in range(3)
        for e in checkpoint.header(rank).layout.entries
        if e.name in checkpoint.header(rank).own
    )
    copies = {"hsdp:2x2": 2, "hsdp:4x1": 4, "ddp": 4}.get(layout, 1)
    whole = sum(row.num_bytes for row in rows) - cut
    assert sum(c["state_bytes"] for c in document["ranks"]) == copies * cut + 4 * whole + own
    assert document["read_bytes"] == sum(c["read_bytes"] for c in document["ranks"])


def test_the_same_ranks_read_their_own_files(root: Path, capsys: Capture) -> None:
    """Without a change of ranks nothing that is cut crosses files."""
    code, document = planned(capsys, root)
    assert (code, document["world_size"], document["imbalance"] >= 1) == (0, 3, True)
    for cost in document["ranks"]:
        assert cost["excess_bytes"] >= 0
        assert cost["memory_bytes"] == cost["read_bytes"] + cost["header_bytes"]
    assert main(["plan", str(root), "--world-size", "20"]) == 0
    text = capsys.readouterr().out
    assert "and 4 ranks that read no more" in text
    assert text.endswith("loads\n")


def test_the_document_has_the_fields_that_are_written_down(root: Path, capsys: Capture) -> None:
    """Every field stands in docs/commands.md."""
    text = (Path(__file__).parents[2] / "docs" / "commands.md").read_text()
    section = text[text.index("## `plan") : text.index("## `repair")]
    document = planned(capsys, root, "--against", root)[1]
    for name in (*document, *document["ranks"][0], *document["against"]):
        assert re.search(rf"\b{name}\b", section), name


def test_what_becomes_of_random_states(tmp_path: Path, capsys: Capture) -> None:
    """Kept, derived on new ranks, dropped with ranks that are no more."""
    save_as_ranks(tmp_path / "two", [rank_state(rank) for rank in range(2)])
    for world_size, line in (
        (2, "kept on ranks 0 to 1"),
        (4, "kept on ranks 0 to 1, derived on ranks 2 to 3"),
        (1, "kept on rank 0, those of rank 1 dropped"),
    ):
        document = planned(capsys, tmp_path / "two", "--world-size", world_size)[1]
        assert document["random_states"] == line
        assert document["data_cursor"] == "none was saved"


def test_what_ranks_have_apart_is_in_the_way(tmp_path: Path, capsys: Capture) -> None:
    """A position in the data of each rank's own; not where the ranks stay the same."""
    states = [rank_state(rank, data={"at": rank}) for rank in range(2)]
    save_as_ranks(tmp_path / "two", states)
    assert planned(capsys, tmp_path / "two")[0] == 0
    code, document = planned(capsys, tmp_path / "two", "--world-size", 3)
    assert (code, document["loads"]) == (1, False)
    assert "allow_missing=['data']" in document["problems"][0]
    assert main(["plan", str(tmp_path / "two"), "--world-size", "3"]) == 1
    assert capsys.readouterr().out.endswith("DOES NOT LOAD\n")


def test_the_data_cursor_goes_on(tmp_path: Path, capsys: Capture) -> None:
    """It says from where; a position that no epoch has does not load."""
    sampler = ResumableSampler(40)
    state = TrainState(model=nn.Linear(2, 2), data=sampler)
    state.progress.advance(samples=8)
    with CheckpointManager(tmp_path / "run", state) as manager:
        manager.save(mode="sync")
    document = planned(capsys, tmp_path / "run", "--world-size", 3)[1]
    assert document["data_cursor"] == "goes on at sample 8 of 40 in epoch 0"
    states = [rank_state(0, data={"epoch": 0, "cursor": 50, "num_samples": 40})]
    save_as_ranks(tmp_path / "one", states)
    code, document = planned(capsys, tmp_path / "one")
    assert (code, len(document["problems"])) == (1, 1)


def test_against_a_model(tmp_path: Path, capsys: Capture) -> None:
    """Names, shapes and dtypes that do not fit, of Hugging Face files and of a checkpoint."""
    torch.manual_seed(0)
    model = Kinds()
    save(tmp_path / "run", model)
    tensors = model.tensors()
    write_files(tmp_path / "same", tensors)
    code, document = planned(capsys, tmp_path / "run", "--against", tmp_path / "same")
    assert (code, document["against"]["num_names"]) == (0, len(tensors))
    assert planned(capsys, tmp_path / "run", "--against", tmp_path / "run")[0] == 0
    tensors["head.weight"] = tensors.pop("embedding.weight")
    tensors["linear.weight"] = tensors["linear.weight"].float()
    tensors["mask"] = torch.zeros(4, dtype=torch.bool)
    tensors["more"] = torch.zeros(1)
    del tensors["scale"]
    write_files(tmp_path / "other", tensors)
    code, document = planned(capsys, tmp_path / "run", "--against", tmp_path / "other")
    found = document["against"]
    assert (code, found["missing"], found["unexpected"]) == (1, ["more"], ["scale"])
    assert found["shapes"] == ["mask: shape [3] in the checkpoint, [4] there"]
    assert found["dtypes"] == ["linear.weight: dtype BF16 in the checkpoint, F32 there"]
    assert main(["plan", str(tmp_path / "run"), "--against", str(tmp_path / "other")]) == 1
    assert "missing in the checkpoint: more" in capsys.readouterr().out


def test_layouts_that_say_nothing_of_other_ranks(tmp_path: Path) -> None:
    """A tensor of some ranks only, and a mesh whose inner axes do not divide; the error names the way out."""
    shape = (4, 6)
    stage = MeshLayout(Mesh((2,), (2, 3)), (Placement(0),))
    parallel = MeshLayout(Mesh.whole((2, 2)), (Placement(0), Placement(1)))
    listed = ListedLayout.of([(1, Box.whole(shape))])
    for layout, world_size in ((stage, 2), (parallel, 3), (listed, 2)):
        held, name = [("F32", shape, layout)], [("model", "w")]
        with pytest.raises(MismatchError, match="hsdp:RxS"):
            target_layouts(name, held, 4, TargetLayout(world_size=world_size))
        assert target_layouts(name, held, 4, TargetLayout(world_size=4)) == [layout]
        (alone,) = target_layouts(name, held, 4, TargetLayout(world_size=1))
        assert alone.boxes_of(shape, 0) == [Box.whole(shape)]
    (grown,) = target_layouts(
        [("model", "w")], [("F32", shape, parallel)], 4, TargetLayout(world_size=6)
    )
    assert grown == MeshLayout(Mesh.whole((3, 2)), parallel.placements)


def test_flat_groups_keep_their_order_on_other_ranks() -> None:
    """The groups of FSDP1 are cut anew, without the padding of the old cut."""
    mesh = Mesh.whole((1, 4))
    held = [("F32", (3,), FlatLayout(mesh, 2, 0)), ("F32", (2, 2), FlatLayout(mesh, 2, 3))]
    names = [("model", "a"), ("model", "b")]
    found = target_layouts(names, held, 4, TargetLayout(world_size=2))
    assert found == [FlatLayout(Mesh.whole((1, 2)), 4, 0), FlatLayout(Mesh.whole((1, 2)), 4, 3)]


def test_it_loads_no_torch(root: Path) -> None:
    """It plans for GPUs where there is not even torch."""
    script = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from fsdp_ckpt.cli import main\n"
        "assert main(['plan', sys.argv[1], '--world-size', '2', '--against', sys.argv[1]]) == 0\n"
        "assert main(['diff', sys.argv[1], sys.argv[1]]) == 0\n"
    )
    command = [sys.executable, "-c", script, str(root)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_costs_are_of_whole_blocks(root: Path) -> None:
    """Nothing is read twice by one rank, and no more than the files hold."""
    checkpoint = Checkpoint.open(open_store(root / "step-000000002"))
    held = sum(file.num_bytes - file.data_offset for file in checkpoint.manifest.files)
    for cost in load_costs(checkpoint, TargetLayout(kind="ddp", world_size=2)):
        assert cost.read_bytes <= held
        assert cost.num_ranges <= cost.num_files


@pytest.mark.parametrize("kind", ["missing", "short", "header", "torn", "empty", "nowhere"])
def test_damage_is_one_line_and_exit_code_1(tmp_path: Path, capsys: Capture, kind: str) -> None:
    """What manifest, sizes and headers tell; the data is not read."""
    folder = save(tmp_path / "run", nn.ParameterDict({"big": torch.zeros(2000)}))
    if kind == "torn":
        (folder / "manifest.json").unlink()
    elif kind in DAMAGES:
        DAMAGES[kind](next(folder.rglob("*.safetensors")))
    else:
        folder = tmp_path / kind
        if kind == "empty":
            folder.mkdir()
    assert main(["plan", str(folder), "--world-size", "2"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("fsdp-ckpt: error: ")
    assert captured.err.count("\n") == 1


def test_a_flipped_byte_of_data_is_not_seen(tmp_path: Path, capsys: Capture) -> None:
    """A plan reads no data; verify does."""
    folder = save(tmp_path / "run", nn.ParameterDict({"big": torch.zeros(2000)}))
    DAMAGES["data"](next(folder.rglob("*.safetensors")))
    assert planned(capsys, folder)[0] == 0
    assert main(["verify", str(folder)]) == 1


def test_wrong_layouts(root: Path, capsys: Capture) -> None:
    """One that there is not is wrong usage; one for other ranks is an error."""
    with pytest.raises(SystemExit) as caught:
        main(["plan", str(root), "--layout", "hsdp:0x4"])
    assert caught.value.code == 2
    assert main(["plan", str(root), "--world-size", "3", "--layout", "hsdp:2x2"]) == 1
    assert "is for 4 ranks" in capsys.readouterr().err
    assert planned(capsys, root, "--layout", "hsdp:2x2")[1]["world_size"] == 4
