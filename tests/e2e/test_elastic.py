"""torchrun starts a job anew whose rank was killed, and the job goes on by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_ckpt.commit.catalog import CheckpointInfo, find_checkpoints
from fsdp_ckpt.storage.open import open_store

pytestmark = [pytest.mark.few_ranks, pytest.mark.slow]

JOB = '''
import os, signal, sys, time
sys.path.insert(0, sys.argv[3])
import torch
import torch.distributed as dist
import fsdp2 as job
from fsdp_ckpt import process_group
from fsdp_ckpt.state.progress import Progress

life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
killed_in, advance = int(sys.argv[2]), Progress.advance


def advance_or_die(self, **counts):
    """Rank 1 dies in step 9, once the checkpoint of step 8 is there: rank 0 has then no save to wait for."""
    if self.step == 8 and life < killed_in and dist.get_rank() == 1:
        while not os.path.exists(os.path.join(sys.argv[1], "step-000000008", "manifest.json")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    advance(self, **counts)


Progress.advance = advance_or_die
with process_group("gloo"):
    code = job.train(sys.argv[1])
sys.exit(code)
'''


def launch(folder: Path, killed_in: int, root: str) -> list[str]:
    """Run the job under torchrun with one restart allowed; return its lines."""
    script = folder / "job.py"
    script.write_text(JOB)
    examples = str(Path(__file__).resolve().parents[2] / "examples")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    found = subprocess.run(
        [*command, str(script), root, str(killed_in), examples],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return [line for line in found.stdout.splitlines() if line.startswith(("begins", "step"))]


def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(tmp_path: Path) -> None:
    """The second life goes on from step 8 by itself, and ends as one life would."""
    root = tmp_path / "run"
    lines = launch(tmp_path, 1, str(root))
    again = lines.index(next(line for line in lines[1:] if line.startswith("begins")))
    assert lines[0] == "begins at step 0"
    assert lines[again] == "begins at step 8"
    first, second = (dict(line.split()[1::2] for line in part) for part in _losses(lines, again))
    assert list(second)[-1] == "12"
    assert {step: loss for step, loss in second.items() if step in first} == {
        step: loss for step, loss in first.items() if step in second
    }
    found = find_checkpoints(open_store(root))
    assert [info.step for info in found if isinstance(info, CheckpointInfo)] == [12, 8, 4]


def _losses(lines: list[str], again: int) -> tuple[list[str], list[str]]:
    """Return the lines of steps before and after the second beginning."""
    return lines[1:again], lines[again + 1 :]
