"""The public face: exact names, loaded on first use."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fsdp_ckpt

PUBLIC = [
    "AlreadyCommittedError",
    "CheckpointError",
    "CheckpointInfo",
    "CheckpointManager",
    "ClosedError",
    "CorruptCheckpointError",
    "IncompleteWriteError",
    "MismatchError",
    "NotFoundError",
    "Progress",
    "RankFailureError",
    "RankLocal",
    "ReshardLoadPlanner",
    "RestoreReport",
    "ResumableSampler",
    "RetentionPolicy",
    "RunStoppedError",
    "SaveHandle",
    "SaveOptions",
    "SavePolicy",
    "ShardSavePlanner",
    "ShardedStorageReader",
    "ShardedStorageWriter",
    "SpikePolicy",
    "StepOutcome",
    "StorageError",
    "TelemetryOptions",
    "TrainState",
    "UnencodableStateError",
    "UnsupportedFormatError",
    "__version__",
    "end_process_group",
    "make_loader",
    "process_group",
]


def loaded_after(statements: str) -> set[str]:
    """Return the names of the modules that a fresh interpreter holds after ``statements``."""
    script = f"{statements}\nimport sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(fsdp_ckpt.__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


def test_all_is_exact() -> None:
    """The public names are these; adding one is a decision, losing one a breaking change."""
    assert fsdp_ckpt.__all__ == PUBLIC
    assert dir(fsdp_ckpt) == sorted(PUBLIC)


def test_every_public_name_is_there() -> None:
    """Each name resolves, and twice to the same thing."""
    for name in PUBLIC:
        assert getattr(fsdp_ckpt, name) is getattr(fsdp_ckpt, name)
    with pytest.raises(AttributeError, match="no attribute 'Absent'"):
        _ = fsdp_ckpt.Absent


def test_type_checkers_see_what_runs() -> None:
    """The imports for type checkers are those that happen on first use."""
    tree = ast.parse(Path(fsdp_ckpt.__file__).read_text())
    (block,) = (
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    seen = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {*seen, "__version__"} == set(PUBLIC)
    for name, module in seen.items():
        assert getattr(fsdp_ckpt, name) is getattr(sys.modules[str(module)], name)


@pytest.mark.parametrize(
    "statements",
    [
        "import fsdp_ckpt",
        "from fsdp_ckpt import CheckpointError, StorageError, __version__",
        "from fsdp_ckpt import CheckpointInfo, RetentionPolicy, SavePolicy, SpikePolicy",
    ],
)
def test_names_that_need_no_torch_load_none(statements: str) -> None:
    """Importing the package, its errors and its listings starts without torch."""
    assert "torch" not in loaded_after(statements)


def test_import_loads_no_dependency() -> None:
    """``import fsdp_ckpt`` alone is as cheap as it looks."""
    loaded = loaded_after("import fsdp_ckpt")
    assert "fsdp_ckpt" in loaded
    assert loaded.isdisjoint({"torch", "numpy", "fsspec", "xxhash", "fsdp_ckpt.errors"})
