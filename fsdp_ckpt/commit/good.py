"""The checkpoint to go back to: the newest from which training went on well."""

from __future__ import annotations

from collections.abc import Container

from fsdp_ckpt.commit.branches import BranchHistory
from fsdp_ckpt.commit.catalog import CheckpointInfo, find_checkpoints, step_folder
from fsdp_ckpt.commit.marks import read_marks
from fsdp_ckpt.storage.store import Store

__all__ = ["find_good", "find_target"]


def find_good(
    root: Store, history: BranchHistory | None = None, known: Container[str] = ()
) -> CheckpointInfo | None:
    """Return the newest checkpoint that is good and was not found damaged.

    Args:
        root: The run's root.
        history: Its rollbacks, where they were read already.
        known: Attempts that are known to be good, marked or not.

    Raises:
        StorageError: The root cannot be read now.
    """
    return find_target(root, history, known=known, below=0, at_most=None)


def find_target(
    root: Store,
    history: BranchHistory | None,
    *,
    known: Container[str],
    below: int,
    at_most: int | None,
    unusable: Container[str] = (),
) -> CheckpointInfo | None:
    """Return the checkpoint for a run to go back to: the newest good one, or the newest before its trouble.

    Args:
        root: The run's root.
        history: Its rollbacks, where they were read already.
        known: Attempts that are known to be good, marked or not.
        below: First step that went wrong: where none is good, one from before it that was not judged.
        at_most: Where the run is; what lies beyond is another run's.
        unusable: Attempts that are out of the question.

    Raises:
        StorageError: The root cannot be read now.
    """
    unjudged = None
    for found in find_checkpoints(root, history):
        if not isinstance(found, CheckpointInfo) or found.attempt in unusable:
            continue
        if at_most is not None and found.step > at_most:
            continue
        kinds = read_marks(root.child(step_folder(found.step)), found.attempt).kinds
        if "corrupt" in kinds:
            continue
        if "good" in kinds or found.attempt in known:
            return found
        if unjudged is None and found.step < below:
            unjudged = found
    return unjudged
