"""The consolidate command: its options reach the library, and it says how far it is."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from fsdp_ckpt.cli import main
from fsdp_ckpt.cli.progress import ProgressLine, duration_text
from tests.weights import save

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.BatchNorm1d(2))
    save(tmp_path / "run", model)
    return tmp_path / "run"


def keys(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return {key: file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118


def test_options_choose_and_name_tensors(root: Path, tmp_path: Path) -> None:
    """Every option of the selection, together."""
    (tmp_path / "map.json").write_text('{"0.bias": "first.bias"}')
    command = ["consolidate", str(root), str(tmp_path / "out"), "--prefix", "m."]
    options = ["--dtype", "bf16", "--exclude", "1.*", "--key-map", str(tmp_path / "map.json")]
    names = ["--rename", r"^(\d)\.=layer\1.", "--rename", "running_=", "--include", "[02].*"]
    assert main([*command, *options, *names]) == 0
    assert keys(tmp_path / "out" / "model.safetensors") == {
        "m.first.bias": "BF16",
        "m.layer0.weight": "BF16",
        "m.layer2.weight": "BF16",
        "m.layer2.bias": "BF16",
        "m.layer2.mean": "BF16",
        "m.layer2.var": "BF16",
        "m.layer2.num_batches_tracked": "I64",
    }


def test_a_dry_run_shows_files_sizes_and_keys(root: Path, tmp_path: Path, capsys: Capture) -> None:
    """In text and as JSON, also over a folder that is not empty; it writes nothing."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").touch()
    command = ["consolidate", str(root), str(out), "--dry-run", "--max-shard-size", "100"]
    assert main(command) == 0
    head, *rows, last = capsys.readouterr().out.splitlines()
    assert head.split() == ["FILE", "SIZE", "KEY"]
    assert rows[0].split()[0] == "model-00001-of-00002.safetensors"
    assert {row.split()[-1] for row in rows} >= {"0.weight", "2.num_batches_tracked"}
    assert last.startswith("would write step 5 -> ")
    assert main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["dry_run"] is True
    assert sum(map(len, document["keys"].values())) == len(rows) == document["num_tensors"]
    assert document["sizes"].keys() == set(document["files"])
    assert [path.name for path in out.iterdir()] == ["mine"]


def test_overflow_is_refused_unless_allowed(tmp_path: Path, capsys: Capture) -> None:
    """An error in one line, with the count; no output."""
    save(tmp_path / "run", nn.ParameterDict({"huge": torch.full((3,), 1e6)}))
    command = ["consolidate", str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", "fp16"]
    assert main(command) == 1
    error = capsys.readouterr().err
    assert "3 numbers of 1 tensors are too large for F16" in error
    assert error.count("\n") == 1
    assert main([*command, "--allow-overflow"]) == 0
    assert keys(tmp_path / "out" / "model.safetensors") == {"huge": "F16"}


@pytest.mark.parametrize("content", ["[]", '{"a": 1}', "{", '{"a": "b", "a": "c"}'])
def test_a_key_map_of_another_form_is_an_error(
    root: Path, tmp_path: Path, capsys: Capture, content: str
) -> None:
    """By the file's name, in one line."""
    path = tmp_path / "map.json"
    path.write_text(content)
    assert main(["consolidate", str(root), str(tmp_path / "out"), "--key-map", str(path)]) == 1
    error = capsys.readouterr().err
    assert str(path) in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_absent_key_map_is_an_error(root: Path, tmp_path: Path, capsys: Capture) -> None:
    """As every other file that is not there."""
    command = ["consolidate", str(root), str(tmp_path / "out"), "--key-map", str(tmp_path / "no")]
    assert main(command) == 1
    assert "no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["--rename", "x"],
        ["--rename", "(=x"],
        ["--rename", "=x"],
        ["--dtype", "int8"],
        ["--what", "x"],
    ],
)
def test_wrong_usage_exits_with_2(options: list[str], capsys: Capture) -> None:
    """As argparse does it."""
    with pytest.raises(SystemExit) as caught:
        main(["consolidate", "run", "out", *options])
    assert caught.value.code == 2
    assert options[0] in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show(stream: io.StringIO, times: list[float]) -> str:
    """Show a run that starts at 100 of 1000 bytes and writes 100 every time; return what was printed."""
    clock = iter(times)
    line = ProgressLine(stream, lambda: next(clock))
    for i in range(len(times)):
        line.show(100 + 100 * i, 1000)
    line.close()
    return stream.getvalue()


def test_progress_on_a_terminal_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar with bytes, rate and time left; redrawn at most five times a second, and gone in the end."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    shown = show(Terminal(), [0.0, 1.0, 1.1, 2.0])
    drawn = [
        line.partition("%")[0][-2:] + line.partition("%")[2]
        for line in shown.replace("\r", "\n").split("\n")
        if "━" in line
    ]
    assert list(dict.fromkeys(drawn)) == [
        "20  200 B of 1 kB, 100 B/s, 8 s left",
        "40  400 B of 1 kB, 150 B/s, 4 s left",
    ]
    assert shown.endswith("\x1b[2K")  # the line that it was on is erased


def test_progress_elsewhere_is_plain_lines() -> None:
    """A log gets a line every ten seconds at most."""
    shown = show(io.StringIO(), [0.0, 5.0, 10.0, 19.0, 20.0])
    assert shown.splitlines() == [
        "30%  300 B of 1 kB, 20 B/s, 35 s left",
        "50%  500 B of 1 kB, 20 B/s, 25 s left",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.6, "1 min 0 s"), (185, "3 min 5 s"), (7800, "2 h 10 min")],
)
def test_durations_read_well(seconds: float, text: str) -> None:
    """In the two largest units."""
    assert duration_text(seconds) == text
