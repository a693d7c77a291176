"""The benchmark of consolidation tells all that is asked of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_consolidate.py"
FIGURES = [
    f"{state}_over_{other}"
    for state in ("cold", "warm")
    for other in ("raw", "torch", "torch_best")
]


def test_the_bench_prints_every_figure(tmp_path: Path) -> None:
    """With a model of a few megabytes and one round, each ratio, each time and the memory are there."""
    tiny = ["--json", "--gib", "0.01", "--rounds", "1", "--folder", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *tiny], capture_output=True, text=True, timeout=550
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert all(found[name] > 0 for name in [*FIGURES, "peak_memory_mb"])
    assert all(time["min_s"] > 0 and time["rounds"] == 1 for time in found["times"].values())
    assert list(tmp_path.iterdir()) == []
