"""Every command in every state of its checkpoint: the right exit code, one line, no traceback; valid JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from fsdp_ckpt.cli import COMMANDS as MODULES
from fsdp_ckpt.cli import main
from fsdp_ckpt.cli.schema import described_commands, read_schema
from tests.cli_runs import COMMANDS, STATES, CliRun, State, deny_all, make_sources, put_in_state

Capture = pytest.CaptureFixture[str]


def pairs(*states: State) -> list[tuple[CliRun, State]]:
    """Return the runs in each of the states; those without a checkpoint, and those of S3, once."""
    first = {run.command: run for run in reversed(COMMANDS)}
    return [
        (run, state)
        for run in COMMANDS
        for state in states
        if (run is first[run.command] or state != "denied")  # to start s3fs takes a second
        and ("{" in run.line or state == "good")
    ]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    make_sources(folder)
    return folder


@pytest.fixture(scope="module")
def denial() -> Iterator[dict[str, str]]:
    with deny_all() as environment:
        yield environment


@pytest.fixture
def environment(denial: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in denial.items():
        monkeypatch.setenv(name, value)


def errors_of(text: str) -> list[str]:
    """Return the lines that are no warnings; check that they are of ours."""
    lines = [line for line in text.splitlines() if not line.startswith("fsdp-ckpt: warning: ")]
    assert all(line.startswith("fsdp-ckpt: error: ") for line in lines)
    return lines


@pytest.mark.parametrize(("run", "state"), pairs(*STATES), ids=str)
@pytest.mark.usefixtures("environment")
def test_a_command_says_in_one_line_what_is_wrong(
    run: CliRun, state: State, sources: Path, tmp_path: Path, capsys: Capture
) -> None:
    """Exit code 0 and no error where all is well; else one line. What --json prints is valid."""
    places = put_in_state(sources, tmp_path, state)
    code = main([*run.argv(**places), "--json"])
    captured = capsys.readouterr()
    is_well = state in run.well
    assert (code, len(errors_of(captured.err))) == ((0, 0) if is_well else (run.error_code, 1)), (
        captured.err
    )
    assert "Traceback" not in captured.out + captured.err
    if run.command != "schema" and (is_well or captured.out):
        jsonschema.validate(json.loads(captured.out), read_schema(run.command))


@pytest.mark.parametrize(("run", "state"), pairs("good", "torn", "flipped"), ids=str)
def test_plain_text_is_as_well(
    run: CliRun, state: State, sources: Path, tmp_path: Path, capsys: Capture
) -> None:
    """Without --json the exit code and the line are the same."""
    places = put_in_state(sources, tmp_path, state)
    code = main(run.argv(**places))
    captured = capsys.readouterr()
    assert (code, len(errors_of(captured.err))) == (
        (0, 0) if state in run.well else (run.error_code, 1)
    )
    assert captured.out or code != 0


def test_every_command_is_in_the_table() -> None:
    """A new command is tested in every state, and describes its JSON."""
    # A module may be called otherwise than its command.
    assert len({run.command for run in COMMANDS}) == len(MODULES)
    assert set(described_commands()) == {run.command for run in COMMANDS} - {"schema"}


@pytest.mark.parametrize("command", described_commands())
def test_schemas_are_strict(command: str, capsys: Capture) -> None:
    """Each is valid, closed, versioned, and printed by ``schema``."""
    assert main(["schema", command]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["additionalProperties"] is False
    assert "schema_version" in schema["required"]


def test_debug_shows_where(tmp_path: Path, capsys: Capture) -> None:
    """Before the command or after it; the one line comes last."""
    for argv in (["--debug", "ls", str(tmp_path)], ["ls", str(tmp_path), "--debug"]):
        assert main(argv) == 1
        lines = capsys.readouterr().err.splitlines()
        assert lines[0].startswith("Traceback")
        assert lines[-1].startswith("fsdp-ckpt: error: ")
