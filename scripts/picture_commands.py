"""Draw what the command looks like on a terminal: `python scripts/picture_commands.py OUT`.

Makes a small run, of which one checkpoint is pinned, one torn and one damaged, runs the real commands on a
pseudo-terminal, and writes what they drew: OUT/ls.svg, show.svg, ranks.svg, verify.svg and damaged.svg.
"""

from __future__ import annotations

import argparse
import io
import os
import pty
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from bench_parts.training import Training
from rich.console import Console
from rich.text import Text

from fsdp_ckpt import CheckpointManager, SaveOptions
from fsdp_ckpt.commit.marks import add_mark, pin
from fsdp_ckpt.storage.open import open_store
from fsdp_ckpt.testing import over_tcp, run_ranks

COLUMNS = 132
STEPS = (500, 1000, 1500, 2000)
STATE_BYTES = 16 * 2**20
# What a bar does to the lines that it draws and erases.
_ERASED = re.compile(r"[^\n]*\r(?:\x1b\[1A)?\x1b\[2K")
_CURSOR = re.compile(r"\x1b\[\?25[lh]")


def save(root: str) -> None:
    """Save a small training state at each step, as one of the ranks."""
    state = Training(STATE_BYTES).state
    with CheckpointManager(root, state, options=SaveOptions(mode="sync")) as manager:
        for step in STEPS:
            state.progress.step = step
            manager.save()


def make_run(root: Path) -> None:
    """Make a run with a checkpoint in each state."""
    run_ranks(save, 2, str(root), timeout_s=120, env=over_tcp())
    store = open_store(str(root))
    for step in STEPS[:2]:
        attempt = next((root / f"step-{step:09d}").glob("2*")).name
        add_mark(store, step, attempt, "good")
    pin(store, STEPS[0])
    (root / f"step-{STEPS[-1]:09d}" / "manifest.json").unlink()
    shard = next((root / f"step-{STEPS[-2]:09d}").glob("*/rank-00001-*"))
    os.truncate(shard, shard.stat().st_size - 1)
    flipped = next((root / f"step-{STEPS[1]:09d}").glob("*/rank-00001-*"))
    data = bytearray(flipped.read_bytes())
    data[-1] ^= 1
    flipped.write_bytes(data)


def run_on_terminal(*argv: str) -> str:
    """Run the command on a pseudo-terminal; return all that it wrote there."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    with subprocess.Popen(
        [sys.executable, "-m", "fsdp_ckpt", *argv], stdout=theirs, stderr=theirs, env=environment
    ):
        os.close(theirs)
        with os.fdopen(ours, "rb") as stream:
            pieces = []
            try:
                while piece := stream.read1(65536):
                    pieces.append(piece)
            except OSError:  # Linux says so where the other end is closed
                pass
    return b"".join(pieces).decode().replace("\r\n", "\n")


def draw(title: str, written: str, path: Path) -> None:
    """Write what stays on the terminal as a picture."""
    text = _CURSOR.sub("", _ERASED.sub("", written))
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(f"$ {title}\n{text}"))
    path.write_text(console.export_svg(title="fsdp-ckpt"), "utf-8")


def main() -> int:
    """Make the run, and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("out", metavar="OUT", type=Path)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="run-") as folder:
        root = Path(folder) / "run"
        make_run(root)
        for name, options in {
            "ls": ["ls", "run"],
            "show": ["show", "run", "--step", "500", "--include", "model.0*"],
            "ranks": ["show", "run", "--step", "500", "--include", "progress.*", "--rank", "1"],
            "verify": ["verify", "run", "--step", "500"],
            "damaged": ["verify", "run", "--step", "1000"],
        }.items():
            argv = [str(root) if word == "run" else word for word in options]
            written = run_on_terminal(*argv).replace(str(root), "run")
            draw(f"fsdp-ckpt {' '.join(options)}", written, out / f"{name}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
