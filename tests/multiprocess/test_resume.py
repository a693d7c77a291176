"""Resumes on real ranks: exact to the bit on the same layout, exact in values on any other."""

from __future__ import annotations

import signal
from itertools import pairwise
from pathlib import Path

import pytest

from fsdp_ckpt.testing import run_ranks
from tests.jobs import GLOBAL_BATCH, NUM_SAMPLES, live


@pytest.mark.parametrize(("workers", "kill_at"), [(0, 2), (2, 5)])
def test_resume_equals_the_uninterrupted_run(tmp_path: Path, workers: int, kill_at: int) -> None:
    """Killed in mid-step and resumed twice in a row, a run goes on to the bit; saving never changes it."""
    never_saved = run_ranks(live, 2, str(tmp_path / "a"), 7, {"workers": workers}).values
    root = str(tmp_path / "b")
    how = {"workers": workers, "save_at": (0, 3, 5), "kill_at": kill_at}
    killed = run_ranks(live, 2, root, 7, how, check=False)
    assert [r.exit_code for r in killed] == [-signal.SIGKILL] * 2
    # Other seeds: nothing may come from how the resumed processes begin.
    resumed = run_ranks(live, 2, root, 6, {"seed": 8, "workers": workers, "save_at": (5,)}).values
    again = run_ranks(live, 2, root, 7, {"seed": 9, "workers": workers}).values
    for rank in range(2):
        reference = never_saved[rank]["records"]
        newest = 3 if kill_at > 3 else 0
        assert resumed[rank]["restored_step"] == newest
        assert resumed[rank]["records"] == reference[newest:6]
        assert again[rank]["restored_step"] == 5
        assert again[rank]["records"] == reference[5:]
        assert again[rank]["digests"] == never_saved[rank]["digests"]
        assert again[rank]["derived"] == ()


def test_world_sizes_4_2_3_1_4(tmp_path: Path) -> None:
    """Weights, moments, steps, schedule, cursor survive every change of the number of ranks to the bit."""
    root = str(tmp_path)
    lives = []
    for hop, world_size in enumerate((4, 2, 3, 1, 4)):
        how = {"seed": hop, "save_at": (hop + 1,)}
        lives.append(run_ranks(live, world_size, root, hop + 1, how).values)
    for before, after in pairwise(lives):
        for record in after:
            assert record["restored"] == before[0]["full"]
    # Steps 1 to 4 make up the epoch: every sample once.
    ids = [
        i for one in lives[:4] for rank in one for record in rank["records"] for i in record["ids"]
    ]
    assert NUM_SAMPLES == 4 * GLOBAL_BATCH
    assert sorted(ids) == list(range(NUM_SAMPLES))
    assert lives[1][0]["derived"], (
        "batch statistics differ per rank, so another world takes rank 0's"
    )
