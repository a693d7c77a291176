"""Which checkpoints a run's root holds.

    ROOT/step-000000500/manifest.json      a checkpoint
    ROOT/step-000000510/<attempt>/...      no manifest: a torn attempt, or a save under way

Discovery and retention ask the same functions, so they agree on what a checkpoint is, and on which branch the
run stands.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from fsdp_ckpt.commit.branches import BranchHistory
from fsdp_ckpt.commit.checkpoint import Checkpoint
from fsdp_ckpt.commit.publish import MANIFEST_KEY
from fsdp_ckpt.commit.rollback import read_history
from fsdp_ckpt.errors import (
    CorruptCheckpointError,
    NotFoundError,
    UnsupportedFormatError,
)
from fsdp_ckpt.manifest.schema import Manifest
from fsdp_ckpt.storage.store import BulkLister, Store

__all__ = [
    "CheckpointInfo",
    "SkippedCheckpoint",
    "find_checkpoints",
    "list_root",
    "list_steps",
    "look_at",
    "step_folder",
]

EPOCH = ("progress", "epoch")  # path under which TrainState saves it
_STEP_FOLDER = re.compile(r"step-(\d{9,18})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """A committed, whole checkpoint.

    Args:
        step: Training step.
        attempt: Id of the save that wrote it.
        generation: Number of rollbacks before it.
        world_size: Ranks that wrote it.
        num_bytes: Bytes of all shard files.
        created: ISO 8601, UTC.
        url: Its folder.
        epoch: Epochs finished by then, where the training state says so.
    """

    step: int
    attempt: str
    generation: int
    world_size: int
    num_bytes: int
    created: str
    url: str
    epoch: int | None = None

    @classmethod
    def of(cls, manifest: Manifest, url: str) -> CheckpointInfo:
        """Describe a manifest found at ``url``."""
        epoch = manifest.values.get(EPOCH)
        return cls(
            step=manifest.step,
            attempt=manifest.attempt,
            generation=manifest.generation,
            world_size=manifest.world_size,
            num_bytes=sum(file.num_bytes for file in manifest.files),
            created=manifest.created,
            url=url,
            epoch=epoch if type(epoch) is int else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedCheckpoint:
    """A step that was passed over.

    Args:
        step: Training step.
        reason: One line.
        torn: Whether it was never committed, rather than damaged later.
        attempt: Id of the save, where its manifest could be read.
        newer: Whether it is of a format version that this package is too old for.
        abandoned: Whether it is of a branch that the run has left.
    """

    step: int
    reason: str
    torn: bool = False
    attempt: str | None = None
    newer: bool = False
    abandoned: bool = False


def step_folder(step: int) -> str:
    """Return the folder of a step's checkpoint, relative to the root."""
    return f"step-{step:09d}"


def list_steps(root: Store, folders: Iterable[str] | None = None) -> list[int]:
    """Return the steps that have a folder, newest first, committed or not; foreign folders are ignored.

    Args:
        root: The run's root.
        folders: Names of its folders, where they were listed already.

    Raises:
        StorageError: The root cannot be read. An absent root is an empty one.
    """
    found = [
        _STEP_FOLDER.fullmatch(name)
        for name in (root.list_folders() if folders is None else folders)
    ]
    # ``step-0000000007`` is not how we write step 7: foreign.
    steps = [int(match[1]) for match in found if match and match[0] == step_folder(int(match[1]))]
    return sorted(steps, reverse=True)


def list_root(root: Store) -> tuple[list[str], list[str]]:
    """Return the names of a root's folders and of its files, by one listing where the store can."""
    if isinstance(root, BulkLister):
        folders, files = root.list_level()
        return folders, list(files)
    return root.list_folders(), list(root.list_files())


def find_checkpoints(
    root: Store, history: BranchHistory | None = None, folders: Iterable[str] | None = None
) -> Iterator[CheckpointInfo | SkippedCheckpoint]:
    """Look at every step, newest first, as far as the caller goes on.

    Newest is by (generation, step). On the branch that the run stands on, that is the order of the steps (see
    ``branches``); what lies on another branch is skipped, whole or not, whatever its step.

    Args:
        root: The run's root.
        history: Its rollbacks, where they were read already.
        folders: Names of its folders, where they were listed already.

    Raises:
        CorruptCheckpointError: A rollback's record is damaged or missing.
        StorageError: The root, or a manifest in it, cannot be read now; never taken for damage.
    """
    if history is None:
        folders, names = list_root(root)
        history = read_history(root, names)
    for step in list_steps(root, folders):
        yield look_at(root.child(step_folder(step)), step, history)[0]


def look_at(
    store: Store,
    step: int,
    history: BranchHistory,
    sizes: Mapping[str, int] | None = None,
) -> tuple[CheckpointInfo | SkippedCheckpoint, Manifest | None]:
    """Tell what a step's folder holds; its manifest too, where there is one that can be read.

    Args:
        store: The folder.
        step: Whose it is.
        history: The run's rollbacks.
        sizes: Key → bytes of what the folder holds, where it was listed already; then what has no manifest
            takes no request, and a whole checkpoint takes one.

    Raises:
        StorageError: It cannot be read now.
    """
    manifest = None
    try:
        if sizes is not None and MANIFEST_KEY not in sizes:
            raise NotFoundError(store.url)
        checkpoint = Checkpoint.open(store)
        manifest = checkpoint.manifest
        if manifest.step != step:
            raise CorruptCheckpointError(f"{store.url}: the manifest is of step {manifest.step}")
        rollback = history.abandoned_by(manifest.generation, step)
        if rollback is not None:
            reason = (
                f"of generation {manifest.generation}, which rollback {rollback.generation} left at step "
                f"{rollback.to_step}"
            )
            skipped = SkippedCheckpoint(
                step=step, reason=reason, attempt=manifest.attempt, abandoned=True
            )
            return skipped, manifest
        _check_files(checkpoint, sizes)
    except NotFoundError:
        reason = "no manifest: a save that died before its commit, or one still under way"
        return SkippedCheckpoint(step=step, reason=reason, torn=True), None
    except CorruptCheckpointError as e:
        attempt = None if manifest is None else manifest.attempt
        return SkippedCheckpoint(step=step, reason=str(e), attempt=attempt), manifest
    except UnsupportedFormatError as e:
        return SkippedCheckpoint(step=step, reason=str(e), newer=True), None
    return CheckpointInfo.of(manifest, store.url), manifest


def _check_files(checkpoint: Checkpoint, sizes: Mapping[str, int] | None) -> None:
    try:
        checkpoint.check_files(sizes)
    except CorruptCheckpointError:
        if sizes is None:
            raise
        # Another checkpoint of the step may have come since the listing.
        checkpoint.check_files()
