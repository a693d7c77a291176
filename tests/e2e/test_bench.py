"""The benchmarks tell all that is asked of them; what they tell is for a quiet machine to say."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
FIGURES = {
    "bench_save": [
        "stall_over_memcpy",
        "stall_over_dcp_async",
        "lazy_stall_over_memcpy",
        "durable_over_raw",
        "durable_over_dcp_sync",
        "durable_over_dcp_async",
        "step_slowdown",
    ],
    "bench_load": ["same_over_raw", "reshard_over_raw"],
    "bench_verify": ["verify_over_raw"],
    "bench_consolidate": [
        *(f"cold_over_{other}" for other in ("raw", "torch", "torch_best")),
        *(f"warm_over_{other}" for other in ("raw", "torch", "torch_best")),
        "peak_memory_mb",
    ],
}


def tiny(folder: Path) -> list[str]:
    """Return the arguments for a state of a few megabytes and one round."""
    return ["--quick", "--json", "--gib", "0.01", "--rounds", "1", "--folder", str(folder)]


def check(script: str, printed: str, folder: Path) -> None:
    """Each ratio and each time is there and positive, and nothing is left."""
    found: dict[str, Any] = json.loads(printed)
    assert all(found[name] > 0 for name in FIGURES[script])
    assert all(time["min_s"] > 0 and time["rounds"] >= 1 for time in found["times"].values())
    if script == "bench_consolidate":  # nothing of the round that warms up is counted
        assert {time["rounds"] for time in found["times"].values()} == {1}
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("script", ["bench_save", "bench_load", "bench_consolidate"])
def test_a_bench_prints_every_figure(
    script: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It finds its parts beside itself, as do its ranks."""
    monkeypatch.syspath_prepend(SCRIPTS)
    assert importlib.import_module(script).main(tiny(tmp_path)) == 0
    check(script, capsys.readouterr().out, tmp_path)


def test_a_bench_is_a_program(tmp_path: Path) -> None:
    """It starts by its path, in an interpreter of its own."""
    program = [sys.executable, str(SCRIPTS / "bench_verify.py"), *tiny(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr
    check("bench_verify", done.stdout, tmp_path)
