"""The command on a terminal, in a pipe, and with names that no terminal should see."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_ckpt.cli import main, verify
from fsdp_ckpt.cli.text import print_line, print_table, printable
from fsdp_ckpt.commit.catalog import step_folder
from fsdp_ckpt.commit.marks import add_mark, pin
from fsdp_ckpt.commit.publish import MANIFEST_KEY
from fsdp_ckpt.storage.local import LocalStore
from tests.roots import attempt_at, put_checkpoint

Capture = pytest.CaptureFixture[str]
EVIL = "w\ud800\x1b[2J\n\u202e"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints and a torn attempt."""
    folder = tmp_path_factory.mktemp("source")
    for step in (1, 2, 3):
        put_checkpoint(LocalStore(str(folder)), step, publish=step != 3)
    return folder


@pytest.fixture
def root(source: Path, tmp_path: Path) -> LocalStore:
    shutil.copytree(source, tmp_path / "run")
    return LocalStore(str(tmp_path / "run"))


def use_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Make stdout a terminal of 120 columns; in the test itself, since pytest has its own until then."""
    stream = Terminal()
    for name, value in (("COLUMNS", "120"), ("TERM", "xterm-256color")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stdout", stream)
    return stream


@pytest.mark.parametrize(
    "argv", [["ls"], ["show"], ["show", "--rank", "0"], ["verify"], ["prune", "--last", "1"]]
)
def test_a_terminal_gets_colours(
    root: LocalStore, monkeypatch: pytest.MonkeyPatch, argv: list[str]
) -> None:
    """What is printed holds the same words as in a pipe, drawn."""
    terminal = use_terminal(monkeypatch)
    assert main([argv[0], root.url, *argv[1:]]) == 0
    assert "\x1b[" in terminal.getvalue()
    assert "2" in terminal.getvalue()


def test_json_is_not_drawn(root: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A document is the same on a terminal."""
    terminal = use_terminal(monkeypatch)
    assert main(["ls", root.url, "--json"]) == 0
    assert json.loads(terminal.getvalue())["schema_version"] == 1


def test_a_pipe_starts_without_rich(root: LocalStore) -> None:
    """Nothing is loaded that only a terminal needs."""
    script = (
        "import sys\n"
        "from fsdp_ckpt.cli import main\n"
        "for argv in (['ls'], ['show', '--step', '2'], ['verify', '--step', '2']):\n"
        "    assert main([*argv, sys.argv[1]]) == 0\n"
        "assert 'rich' not in sys.modules and 'torch' not in sys.modules\n"
    )
    command = [sys.executable, "-c", script, root.url]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "\x1b" not in ended.stdout


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that cannot draw."""
    terminal = use_terminal(monkeypatch)
    monkeypatch.setenv("TERM", "dumb")
    print_line("well", "green")
    assert terminal.getvalue() == "well\n"


def test_what_is_too_long_is_broken_and_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every character of a cell is there."""
    terminal = use_terminal(monkeypatch)
    print_table(("NAME", "SIZE"), [("x" * 300, "1 kB")], right=(1,))
    assert terminal.getvalue().count("x") == 300
    print_line("y" * 300)
    assert terminal.getvalue().count("y") == 300


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("ä 漢 w.0", "ä 漢 w.0"),
        ("a\nb\t", "a\\nb\\t"),
        ("\x1b[2J", "\\x1b[2J"),
        ("\ud800", "\\ud800"),
        ("\u202egnp", "\\u202egnp"),
    ],
)
def test_what_cannot_be_seen_is_escaped(text: str, shown: str) -> None:
    """Control characters, lone surrogates, and what turns the direction of writing."""
    assert printable(text) == shown


@pytest.mark.parametrize(
    ("command", "encoding"), [("show", "utf-8"), ("show", "ascii"), ("verify", "utf-8")]
)
def test_names_that_cannot_be_printed_end_no_command(
    root: LocalStore, command: str, encoding: str
) -> None:
    """Whatever the names and the encoding of stdout: no traceback, no control character."""
    manifest = put_checkpoint(root, 4, publish=False)
    (row,) = manifest.tensors
    evil = dataclasses.replace(
        manifest, tensors=(dataclasses.replace(row, path=(EVIL,)),), values={("ä", EVIL): EVIL}
    )
    Path(root.url, step_folder(4), MANIFEST_KEY).write_bytes(evil.to_bytes())
    environment = {"PYTHONIOENCODING": encoding, "PATH": "/usr/bin:/bin"}
    ended = subprocess.run(
        [sys.executable, "-m", "fsdp_ckpt", command, root.url, "--step", "4"],
        capture_output=True,
        env=environment,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert ended.returncode == (1 if command == "verify" else 0)
    assert b"Traceback" not in ended.stderr
    assert b"\x1b" not in ended.stdout + ended.stderr
    if command == "show":
        assert b"w\\ud800\\x1b[2J\\n\\u202e" in ended.stdout


def test_ls_says_what_is_known_of_each(root: LocalStore, capsys: Capture) -> None:
    """Layout, health, pins; damage that a restore has found counts."""
    add_mark(root, 2, attempt_at(2 / 3600), "good")
    pin(root, 1)
    assert main(["ls", root.url, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(c["health"], c["pinned"], c["layout"]) for c in found] == [
        ("good", False, "S0 over 2"),
        ("candidate", True, "S0 over 2"),
    ]
    add_mark(root, 1, attempt_at(1 / 3600), "corrupt")
    assert main(["ls", root.url]) == 1
    captured = capsys.readouterr()
    assert "damaged" in captured.out
    assert "step 1" in captured.err


def test_ls_limit_says_how_many_more(root: LocalStore, capsys: Capture) -> None:
    """The newest steps, torn ones among them."""
    assert main(["ls", root.url, "--limit", "2"]) == 0
    assert "1 older step(s) not looked at" in capsys.readouterr().out
    assert main(["ls", root.url, "--limit", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [c["step"] for c in document["checkpoints"]] == [2]
    assert [s["kind"] for s in document["skipped"]] == ["torn"]
    assert document["num_older"] == 1


def test_show_filters(root: LocalStore, capsys: Capture) -> None:
    """By name, dtype and part; nothing left is an error, and so is a rank that was not there."""

    def tensors(*options: str) -> list[str]:
        assert main(["show", root.url, "--step", "2", "--json", *options]) == 0
        return [t["name"] for t in json.loads(capsys.readouterr().out)["tensors"]]

    assert tensors() == tensors("--include", "?") == tensors("--dtype", "float32") == ["w"]
    assert tensors("--include", "progress.*") == []
    for options in (["--dtype", "bf16"], ["--what", "model"], ["--include", "x*"], ["--rank", "2"]):
        assert main(["show", root.url, "--step", "2", *options]) == 1
        assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(SystemExit):
        main(["show", root.url, "--dtype", "int99"])


def test_verify_fast_reads_no_data(root: LocalStore, capsys: Capture) -> None:
    """A changed byte of data is not seen, a changed header is."""
    path = next(Path(root.url, step_folder(2)).glob("*/rank-00001-*"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert main(["verify", root.url, "--step", "2", "--fast"]) == 0
    assert "data not read: whole" in capsys.readouterr().out
    assert main(["verify", root.url, "--step", "2", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["reads_data"], document["damaged_ranks"]) == (True, [1])
    data[100] ^= 1
    path.write_bytes(data)
    assert main(["verify", root.url, "--step", "2", "--fast"]) == 1


@pytest.mark.parametrize(
    ("error", "code", "lines"),
    [(KeyboardInterrupt(), 130, 0), (ValueError("odd\nthing"), 1, 1)],
)
def test_an_end_from_outside_is_quiet(
    root: LocalStore,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    error: BaseException,
    code: int,
    lines: int,
) -> None:
    """Ctrl-C says nothing, an error that nobody thought of is one line too."""

    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(verify, "_find", fail)
    assert main(["verify", root.url, "--step", "2"]) == code
    assert capsys.readouterr().err.count("\n") == lines
