"""The README's programs run, and do what it says of them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from fsdp_ckpt.cli import main
from tests.bits import bits

README = Path(__file__).resolve().parents[2] / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)


def run(block: str) -> dict[str, Any]:
    """Run a block as a program of its own; return its variables."""
    found: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(block, str(README), "exec"), found)
    return found


def block_with(text: str) -> str:
    (block,) = [block for block in BLOCKS if text in block]
    return block


def test_quick_start_resumes_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick start, killed after its second checkpoint and started again, ends with the same weights."""
    quick_start = block_with('CheckpointManager("run-1"')
    monkeypatch.chdir(tmp_path)
    whole = run(quick_start)
    assert whole["report"].is_fresh
    assert [found.name for found in sorted(tmp_path.glob("run-1/step-*"))] == [
        f"step-{step:09d}" for step in (5, 10, 15, 20)
    ]
    for step in (15, 20):
        shutil.rmtree(tmp_path / "run-1" / f"step-{step:09d}")
    resumed = run(quick_start)
    assert resumed["report"].step == 10
    for name in ("model", "optimizer", "scheduler", "sampler", "progress"):
        assert bits(resumed[name].state_dict()) == bits(whole[name].state_dict()), name
    assert main(["verify", "run-1"]) == 0


@pytest.mark.parametrize("block", BLOCKS)
def test_every_block_is_python(block: str) -> None:
    """No block has a syntax error, the ones that need several ranks neither."""
    compile(block, str(README), "exec")


def test_commands_are_those_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """Each command that the README lists tells how it is used, and none is left out."""
    listed = re.findall(r"^fsdp-ckpt (\w+) ", README.read_text(), re.MULTILINE)
    with pytest.raises(SystemExit):
        main(["--help"])
    assert set(re.findall(r"^    (\w+)\b", capsys.readouterr().out, re.MULTILINE)) == set(listed)
