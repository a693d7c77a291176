"""From what a user names to one committed checkpoint.

a checkpoint's folder        that checkpoint, damaged or not
a run's root                 its newest whole checkpoint, and which newer ones were passed over
a run's root and a step      that checkpoint, damaged or not
"""

from __future__ import annotations

from contextlib import suppress

from fsdp_ckpt.commit.catalog import (
    CheckpointInfo,
    SkippedCheckpoint,
    find_checkpoints,
    list_steps,
    step_folder,
)
from fsdp_ckpt.commit.checkpoint import Checkpoint
from fsdp_ckpt.errors import CorruptCheckpointError, NotFoundError
from fsdp_ckpt.storage.store import Store

__all__ = ["locate_checkpoint"]


def locate_checkpoint(
    store: Store, step: int | None = None
) -> tuple[Checkpoint, tuple[SkippedCheckpoint, ...]]:
    """Open the checkpoint that ``store`` and ``step`` name.

    Args:
        store: A run's root, or one checkpoint's folder.
        step: Which checkpoint under the root; the newest whole one by default.

    Returns:
        The checkpoint, and the newer ones that were passed over.

    Raises:
        NotFoundError: No checkpoint here, or none of this step.
        CorruptCheckpointError: The named checkpoint's manifest is damaged, or no checkpoint of the root is
            whole.
        UnsupportedFormatError: The named checkpoint is of a newer format version.
        StorageError: The store cannot be read now.
    """
    if step is not None:
        return _open_step(store, step), ()
    with suppress(NotFoundError):
        return Checkpoint.open(store), ()
    return _open_newest(store)


def _open_step(root: Store, step: int) -> Checkpoint:
    try:
        return Checkpoint.open(root.child(step_folder(step)))
    except NotFoundError as e:
        shown = ", ".join(map(str, list_steps(root)[:5])) or "none"
        raise NotFoundError(
            f"{root.url}: no checkpoint of step {step}; newest steps there: {shown}", step=step
        ) from e


def _open_newest(root: Store) -> tuple[Checkpoint, tuple[SkippedCheckpoint, ...]]:
    skipped: list[SkippedCheckpoint] = []
    for found in find_checkpoints(root):
        if isinstance(found, CheckpointInfo):
            return Checkpoint.open(root.child(step_folder(found.step))), tuple(skipped)
        skipped.append(found)
    damaged = [s for s in skipped if not s.torn]
    if damaged:
        raise CorruptCheckpointError(
            f"{root.url}: no whole checkpoint among {len(skipped)}; the newest: {damaged[0].reason}",
            step=damaged[0].step,
        )
    if skipped:
        raise NotFoundError(
            f"{root.url}: no checkpoint, only {len(skipped)} torn attempt(s), the newest of step "
            f"{skipped[0].step}; name another root"
        )
    raise NotFoundError(
        f"{root.url}: no checkpoint here; name a run's root or the folder that holds a manifest.json"
    )
