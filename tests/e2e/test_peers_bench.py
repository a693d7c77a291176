"""The bench beside other libraries: what of it runs without them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.few_ranks

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.mark.skipif(
    importlib.util.find_spec("torch_checkpointing") is not None, reason="the libraries are here"
)
def test_the_bench_says_in_one_line_what_is_missing() -> None:
    """Without the other libraries it starts no rank, and names what to install and how."""
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "bench_peers.py"), "--quick"],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert "torch_checkpointing" in line
    assert "make bench-full" in line


def test_a_file_that_was_fsynced_whole_is_durable(tmp_path: Path) -> None:
    """The verdict tells files that were fsynced, by a child process too, from others, and those that grew."""
    script = """
import os, subprocess, sys
from pathlib import Path
from bench_parts.peers.fsyncs import forget, judge, watch

notes, place = Path(sys.argv[1], "notes"), Path(sys.argv[1], "place")
notes.mkdir(), place.mkdir()
log = watch(notes)

def write(name, *, late=b""):
    with open(place / name, "wb", buffering=0) as file:
        file.write(b"first")
        os.fsync(file.fileno())
        file.write(late)

write("here")
child = "import os, sys; fd = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY); os.fdatasync(fd)"
subprocess.run([sys.executable, "-c", child, str(place / "there")], check=True)
print(judge([log], place))
write("early", late=b"last")
print(judge([log], place))
(place / "never").touch()
print(judge([log], place))
forget(log)
print(judge([log], place))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(SCRIPTS)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["yes", "but 4 B", "no: 1 of 4 files", "no"]
