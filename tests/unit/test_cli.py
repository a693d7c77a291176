"""The command says what is there, in text or JSON, and its exit code says whether all is well."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fsdp_ckpt import CheckpointManager, TrainState
from fsdp_ckpt.cli import main

Capture = pytest.CaptureFixture[str]


def save(root: Path, model: nn.Module, *steps: int) -> list[Path]:
    """Save checkpoints; return their folders."""
    state = TrainState(model=model)
    folders = []
    with CheckpointManager(root, state) as manager:
        for step in steps:
            state.progress.step = step
            folders.append(Path(manager.save(mode="sync").wait().url))
    return folders


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 4)


@pytest.fixture
def root(tmp_path: Path, model: nn.Module) -> Path:
    save(tmp_path / "run", model, 5, 6)
    return tmp_path / "run"


def shard(root: Path, step: int) -> Path:
    return next((root / f"step-{step:09d}").glob("*/rank-*.safetensors"))


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


# --- ls ---


def test_ls_lists_newest_first(root: Path, capsys: Capture) -> None:
    """One line per checkpoint, aligned; exit code 0."""
    assert main(["ls", str(root)]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == [
        "STEP", "AGE", "SIZE", "RANKS", "LAYOUT", "HEALTH", "PINNED", "BRANCH", "ATTEMPT",
    ]  # fmt: skip
    assert [row.split()[0] for row in rows] == ["6", "5"]
    assert {row.index(row.split()[-1]) for row in rows} == {head.index("ATTEMPT")}


def test_ls_as_json(root: Path, capsys: Capture) -> None:
    """One document with every field."""
    assert main(["ls", str(root), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["root"] == str(root)
    assert document["skipped"] == []
    assert [c["step"] for c in document["checkpoints"]] == [6, 5]
    assert document["checkpoints"][0]["num_bytes"] == shard(root, 6).stat().st_size


def test_ls_tells_torn_from_damaged(root: Path, capsys: Capture) -> None:
    """A torn attempt may be a save under way; damage is not well."""
    torn = root / "step-000000007"
    torn.mkdir()
    assert main(["ls", str(root)]) == 0
    assert "torn" in capsys.readouterr().out
    shard(root, 6).unlink()
    assert main(["ls", str(root), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert [(s["step"], s["torn"]) for s in document["skipped"]] == [(7, True), (6, False)]
    assert "missing" in document["skipped"][1]["reason"]
    assert main(["ls", str(root)]) == 1
    assert "damaged" in capsys.readouterr().out


def test_ls_of_nothing_is_an_error(tmp_path: Path, capsys: Capture) -> None:
    """An absent root is not an empty list."""
    assert main(["ls", str(tmp_path / "nowhere")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("fsdp-ckpt: error: ")
    assert captured.err.count("\n") == 1
    (tmp_path / "run" / "step-000000007").mkdir(parents=True)
    assert main(["ls", str(tmp_path / "run")]) == 1
    assert "torn" in capsys.readouterr().out


# --- show ---


def test_show_names_tensors_files_and_values(root: Path, capsys: Capture) -> None:
    """Of the newest checkpoint, a step's, or a folder's."""
    assert main(["show", str(root), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["step"] == 6
    tensors = {t["name"]: t for t in document["tensors"]}
    assert tensors["model.weight"] == {
        "name": "model.weight",
        "dtype": "F32",
        "shape": [4, 3],
        "layout": "rank 0",
        "num_bytes": 48,
    }
    assert "progress.step" in document["values"]
    assert document["files"][0]["num_bytes"] == shard(root, 6).stat().st_size
    assert main(["show", str(root), "--step", "5"]) == 0
    text = capsys.readouterr().out
    assert "step 5" in text
    assert any(line.split()[:3] == ["model.weight", "F32", "[4,"] for line in text.splitlines())
    assert main(["show", str(root / "step-000000005")]) == 0
    # The second line tells the age, which goes on.
    same = [
        lines[:1] + lines[2:] for lines in (text.splitlines(), capsys.readouterr().out.splitlines())
    ]
    assert same[0] == same[1]


def test_a_damaged_newest_is_passed_over_aloud(root: Path, capsys: Capture) -> None:
    """Under a root; a named step is an error instead."""
    shard(root, 6).unlink()
    assert main(["consolidate", str(root), str(root / "out"), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["step"] == 5
    assert captured.err.startswith("fsdp-ckpt: warning: passed over step 6: ")
    assert main(["consolidate", str(root), str(root / "out2"), "--step", "6"]) == 1
    assert "missing" in capsys.readouterr().err


# --- verify ---


def test_verify_reads_every_byte(root: Path, capsys: Capture) -> None:
    """A changed byte that no size tells is found, and the tensors it may belong to are named."""
    assert main(["verify", str(root)]) == 0
    assert capsys.readouterr().out.endswith("whole\n")
    flip_last_byte(shard(root, 6))
    assert main(["ls", str(root)]) == 0
    capsys.readouterr()
    assert main(["verify", str(root)]) == 1
    out = capsys.readouterr().out
    assert "model.weight" in out
    assert "DAMAGED in 1 places" in out
    assert main(["verify", str(root), "--step", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["is_whole"] is True


def test_verify_reports_all_damage(tmp_path: Path, capsys: Capture) -> None:
    """Every damaged block, not only the first."""
    (folder,) = save(tmp_path, nn.ParameterDict({"big": torch.zeros(12 * 2**20)}), 1)
    path = next(folder.glob("*/rank-*.safetensors"))
    data = bytearray(path.read_bytes())
    for position in (10_000_000, 30_000_000, 40_000_000, 40_000_001):
        data[position] ^= 1
    path.write_bytes(data)
    assert main(["verify", str(folder), "--json", "--threads", "3"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["is_whole"] is False
    assert len(document["damage"]) == 3
    assert all("model.big" in line and "rank 0" in line for line in document["damage"])


@pytest.mark.parametrize("kind", ["missing", "short", "long", "header"])
def test_verify_finds_damaged_files(root: Path, capsys: Capture, kind: str) -> None:
    """Whatever is wrong with a file is one line naming it."""
    path = shard(root, 6)
    data = bytearray(path.read_bytes())
    match kind:
        case "missing":
            path.unlink()
        case "short":
            path.write_bytes(data[:-1])
        case "long":
            path.write_bytes(data + b"x")
        case "header":
            data[30] ^= 1
            path.write_bytes(data)
    assert main(["verify", str(root), "--step", "6", "--json"]) == 1
    (line,) = json.loads(capsys.readouterr().out)["damage"]
    assert path.name in line
    assert "model.weight" in line


def test_a_damaged_manifest_is_an_error(root: Path, capsys: Capture) -> None:
    """On stderr, in one line."""
    manifest = root / "step-000000006" / "manifest.json"
    manifest.write_text(manifest.read_text()[:-10])
    assert main(["verify", str(root / "step-000000006")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1


# --- consolidate ---


def test_consolidate_writes_files_of_the_asked_size(
    root: Path, tmp_path: Path, capsys: Capture
) -> None:
    """Options reach the library; a second run is refused, and overwrites when told to."""
    origin, out = tmp_path / "origin", tmp_path / "out"
    origin.mkdir()
    (origin / "config.json").write_text("{}")
    command = ["consolidate", str(root), str(out)]
    options = ["--max-shard-size", "48B", "--config-from", str(origin), "--threads", "1"]
    assert main([*command, *options]) == 0
    assert "2 tensors, 64 B, in 2 file(s)" in capsys.readouterr().out
    assert {p.name for p in out.iterdir()} == {
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    }
    assert main(command) == 1
    assert "overwrite" in capsys.readouterr().err
    assert main([*command, "--overwrite", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == ["model.safetensors"]


# --- the command itself ---


def test_no_command_loads_torch(root: Path, tmp_path: Path) -> None:
    """The command starts fast, and works where torch is not installed."""
    script = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from fsdp_ckpt.cli import main\n"
        "root, out = sys.argv[1:]\n"
        "for command in ('ls', 'show', 'verify'):\n"
        "    assert main([command, root]) == 0\n"
        "assert main(['consolidate', root, out]) == 0\n"
        "assert sys.modules['torch'] is None and 'transformers' not in sys.modules\n"
    )
    command = [sys.executable, "-c", script, str(root), str(tmp_path / "out")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_it_runs_as_a_module(root: Path) -> None:
    """``python -m fsdp_ckpt``; a reader that stops early is no traceback."""
    command = [sys.executable, "-m", "fsdp_ckpt"]
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert version.stdout.startswith("fsdp-ckpt ")
    reader, writer = os.pipe()
    os.close(reader)  # before there is anything to read
    with open(writer, "wb") as output:
        show = [*command, "show", str(root)]
        ended = subprocess.run(show, stdout=output, stderr=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stderr) == (141, b"")


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["unknown"],
        ["ls"],
        ["show", "x", "--step", "one"],
        ["consolidate", "x", "y", "--max-shard-size", "5 apples"],
        ["verify", "x", "--threads", "0"],
    ],
)
def test_wrong_usage_exits_with_2(argv: list[str], capsys: Capture) -> None:
    """As argparse does it, with the usage on stderr."""
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert "usage: fsdp-ckpt" in capsys.readouterr().err
