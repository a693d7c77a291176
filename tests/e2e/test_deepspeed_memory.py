"""An import takes as much memory for a large model as for a small one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.deepspeed_files import write_large
from tests.e2e.test_consolidate_memory import MODEL_BYTES, MOST_BYTES, peak_bytes

pytestmark = pytest.mark.few_ranks


def test_peak_memory_is_bounded(tmp_path: Path) -> None:
    """Less than 300 MB over an idle interpreter, for 400 MB of weights in two ranks' files."""
    write_large(tmp_path / "ds", MODEL_BYTES)
    command = ["-m", "fsdp_ckpt", "import-deepspeed", str(tmp_path / "ds"), str(tmp_path / "run")]
    taken = peak_bytes(*command) - peak_bytes("-c", "")
    assert taken < MOST_BYTES
    written = sum(os.stat(path).st_size for path in (tmp_path / "run").rglob("*.safetensors"))
    assert written > MODEL_BYTES
