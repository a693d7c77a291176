"""torchrun starts a job anew whose rank was killed, and the job goes on by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_ckpt.commit.catalog import CheckpointInfo, find_checkpoints
from fsdp_ckpt.storage.open import open_store

pytestmark = pytest.mark.few_ranks

JOB = '''
import os, signal, sys
sys.path.insert(0, sys.argv[3])
import torch
import torch.distributed as dist
import examples.fsdp2 as job
from fsdp_ckpt import process_group
from fsdp_ckpt.state.progress import Progress

life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
killed_in, advance = int(sys.argv[2]), Progress.advance


def advance_or_die(self, **counts):
    """Rank 1 dies in step 7: the save of step 4 may still be under way, in its writer process."""
    if self.step == 6 and life < killed_in and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    advance(self, **counts)


Progress.advance = advance_or_die
with process_group("gloo"):
    code = job.train(sys.argv[1])
sys.exit(code)
'''


def launch(folder: Path, killed_in: int, root: str) -> tuple[int, list[str]]:
    """Run the job under torchrun with one restart allowed; return exit code and the job's lines."""
    script = folder / "job.py"
    script.write_text(JOB)
    repository = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    found = subprocess.run(
        [*command, str(script), root, str(killed_in), repository],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    lines = [line for line in found.stdout.splitlines() if line.startswith(("begins", "step"))]
    assert lines, found.stderr
    return found.returncode, lines


def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(tmp_path: Path) -> None:
    """The second life goes on from step 4 or from the start, whichever was durable, and ends as one life."""
    root = tmp_path / "run"
    code, lines = launch(tmp_path, 1, str(root))
    assert code == 0
    begins = [line for line in lines if line.startswith("begins")]
    assert begins[0] == "begins at step 0"
    assert begins[1:] in (["begins at step 4"], ["begins at step 0"])
    last = lines[lines.index(begins[1], 1) + 1 :]
    first_life, second_life = ({l.split()[1]: l for l in part} for part in (lines[1:7], last))
    assert all(
        second_life[step] == line for step, line in first_life.items() if step in second_life
    )
    assert list(second_life)[-1] == "12"
    whole = [
        found for found in find_checkpoints(open_store(root)) if isinstance(found, CheckpointInfo)
    ]
    assert [found.step for found in whole] == [12, 8, 4]
