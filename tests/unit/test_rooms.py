"""The table of rooms, where an import contract cannot state it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "fsdp_ckpt"
DCP = "torch.distributed.checkpoint"
KNOW_DCP = {"dcp", "state"}
TORCH_FREE = (
    "plan",
    "manifest",
    "storage",
    "commit",
    "stability",
    "compare",
    "telemetry",
    "report",
)


def imported_modules(source: str) -> Iterator[str]:
    """Yield what any import statement of ``source`` may load, inside functions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules_of(room: str) -> list[str]:
    files = sorted((PACKAGE / room).rglob("*.py"))
    return [".".join(f.relative_to(PACKAGE.parent).with_suffix("").parts) for f in files]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (f"import {DCP} as dcp", True),
        ("from torch.distributed import checkpoint", True),
        (f"def f():\n    from {DCP}.planner import SavePlan", True),
        ("import torch.distributed as dist", False),
    ],
)
def test_every_way_to_import_dcp_is_seen(source: str, found: bool) -> None:
    """The search below would find it however it is written."""
    assert any(name.startswith(DCP) for name in imported_modules(source)) is found


def test_only_dcp_and_state_import_dcp() -> None:
    """DCP stays behind two doors."""
    files = [f for f in PACKAGE.rglob("*.py") if f.relative_to(PACKAGE).parts[0] not in KNOW_DCP]
    assert files
    for file in files:
        names = [name for name in imported_modules(file.read_text()) if name.startswith(DCP)]
        assert names == [], f"{file.relative_to(PACKAGE.parent)} imports {names}"


def test_torch_free_rooms_load_no_torch() -> None:
    """A process that imports all of them has no torch in memory, whatever their dependencies do."""
    names = ["fsdp_ckpt", *(name for room in TORCH_FREE for name in modules_of(room))]
    script = f"import {', '.join(names)}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
