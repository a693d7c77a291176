"""The benchmarks tell all that is asked of them; what they tell is for a quiet machine to say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
FIGURES = {
    "bench_save.py": [
        "stall_over_memcpy",
        "stall_over_dcp_async",
        "lazy_stall_over_memcpy",
        "durable_over_raw",
        "durable_over_dcp_sync",
        "durable_over_dcp_async",
        "step_slowdown",
    ],
    "bench_load.py": ["same_over_raw", "reshard_over_raw"],
    "bench_verify.py": ["verify_over_raw"],
}


@pytest.mark.parametrize("script", FIGURES)
def test_a_bench_prints_every_figure(script: str, tmp_path: Path) -> None:
    """With a state of a few megabytes and one round, each ratio and each time is there and positive."""
    tiny = ["--quick", "--json", "--gib", "0.01", "--rounds", "1", "--folder", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / script), *tiny], capture_output=True, text=True, timeout=550
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert all(found[name] > 0 for name in FIGURES[script])
    assert all(time["min_s"] > 0 and time["rounds"] >= 1 for time in found["times"].values())
    assert list(tmp_path.iterdir()) == []
