"""Everything under a root that takes space: what retention decides about.

    root ──> checkpoints of the current branch, with their marks
         ──> checkpoints of branches that the run has left
         ──> loose attempts: files that no manifest names
         ──> what is damaged, or of a newer format: left alone

Invariant: nothing is listed twice, and what this package does not know is not listed at all.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fsdp_ckpt.commit.branches import BranchHistory
from fsdp_ckpt.commit.catalog import (
    CheckpointInfo,
    SkippedCheckpoint,
    find_checkpoints,
    step_folder,
)
from fsdp_ckpt.commit.fence import Fences, read_fences
from fsdp_ckpt.commit.marks import Marks, mark_of, read_marks
from fsdp_ckpt.commit.recover import rebuild_manifest
from fsdp_ckpt.commit.rollback import read_history
from fsdp_ckpt.errors import CorruptCheckpointError, NotFoundError
from fsdp_ckpt.storage.store import Store

__all__ = ["HeldCheckpoint", "Inventory", "LooseAttempt", "begun_at", "take_inventory"]

# Folders of other names may be anyone's.
_ATTEMPT = re.compile(r"(\d{8}T\d{12})-[0-9a-f]{12}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldCheckpoint:
    """A whole checkpoint of the current branch.

    Args:
        info: What it is.
        marks: What is known about it.
    """

    info: CheckpointInfo
    marks: Marks


@dataclass(frozen=True, slots=True, kw_only=True)
class LooseAttempt:
    """Files of a save that no manifest names.

    Args:
        step: In whose folder they lie.
        id: Of the attempt.
        is_recoverable: Whether its files are all whole, on the current branch, of no job that another one has
            followed, and where there is no manifest: a restore may publish it.
        is_pruned: Whether its deletion has begun.
    """

    step: int
    id: str
    is_recoverable: bool
    is_pruned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """What a root holds.

    Args:
        history: The run's rollbacks.
        checkpoints: Newest first.
        abandoned: Checkpoints of branches that the run has left.
        pinned: Attempts of those of them that are pinned.
        half_deleted: Attempts of checkpoints, of whichever branch, whose deletion was begun.
        loose: Attempts without a manifest.
        left_alone: Damaged checkpoints, and those of a newer format.
    """

    history: BranchHistory
    checkpoints: tuple[HeldCheckpoint, ...] = ()
    abandoned: tuple[SkippedCheckpoint, ...] = ()
    pinned: frozenset[str] = frozenset()
    half_deleted: frozenset[str] = frozenset()
    loose: tuple[LooseAttempt, ...] = ()
    left_alone: tuple[SkippedCheckpoint, ...] = ()


def begun_at(attempt: str) -> float | None:
    """Return when an attempt began, in seconds since 1970; ``None`` for ids of other programs."""
    match = _ATTEMPT.fullmatch(attempt)
    if match is None:
        return None
    try:
        begun = datetime.datetime.strptime(match[1], "%Y%m%dT%H%M%S%f")
    except ValueError:
        return None
    return begun.replace(tzinfo=datetime.UTC).timestamp()


def take_inventory(root: Store, *, with_metrics: bool = False) -> Inventory:
    """Look at everything under a root; reads manifests, and the headers of loose attempts.

    Args:
        root: The run's root.
        with_metrics: Read the scores of checkpoints too.

    Raises:
        CorruptCheckpointError: The record of a rollback or of a score is damaged.
        UnsupportedFormatError: One is of a newer version.
        StorageError: The root cannot be read now.
    """
    history, fences = read_history(root), read_fences(root)
    held: list[HeldCheckpoint] = []
    abandoned: list[SkippedCheckpoint] = []
    pinned: set[str] = set()
    half_deleted: set[str] = set()
    loose: list[LooseAttempt] = []
    left_alone: list[SkippedCheckpoint] = []
    for found in find_checkpoints(root, history):
        if isinstance(found, SkippedCheckpoint) and not (found.abandoned or found.torn):
            # Whose files are whose is not known for certain.
            left_alone.append(found)
            continue
        store = root.child(step_folder(found.step))
        names = store.list_files()
        if found.attempt is not None:  # a checkpoint, of whichever branch
            scored = with_metrics and isinstance(found, CheckpointInfo)
            marks = read_marks(store, found.attempt, names=names, with_metrics=scored)
            if isinstance(found, CheckpointInfo):
                held.append(HeldCheckpoint(info=found, marks=marks))
            else:
                abandoned.append(found)
                if "pinned" in marks.kinds:
                    pinned.add(found.attempt)
            if "pruned" in marks.kinds:
                half_deleted.add(found.attempt)
        loose.extend(_loose_attempts(store, names, found, history, fences))
    return Inventory(
        history=history,
        checkpoints=tuple(held),
        abandoned=tuple(abandoned),
        pinned=frozenset(pinned),
        half_deleted=frozenset(half_deleted),
        loose=tuple(loose),
        left_alone=tuple(left_alone),
    )


def _loose_attempts(
    store: Store,
    names: Iterable[str],
    found: CheckpointInfo | SkippedCheckpoint,
    history: BranchHistory,
    fences: Fences,
) -> Iterator[LooseAttempt]:
    """Yield the attempts of a step's folder that are not its checkpoint's."""
    marks = (mark_of(name) for name in names)
    pruned = {mark[1] for mark in marks if mark is not None and mark[0] == "pruned"}
    # Of a deletion that died near its end only the mark is left.
    for attempt in sorted(pruned.union(store.list_folders())):
        if attempt == found.attempt or begun_at(attempt) is None:
            continue
        # Some stores keep the name of an empty folder.
        if attempt not in pruned and not store.child(attempt).list_files():
            continue
        is_free = found.attempt is None and not fences.is_dead(attempt)
        yield LooseAttempt(
            step=found.step,
            id=attempt,
            is_recoverable=is_free and _is_complete(store, attempt, history),
            is_pruned=attempt in pruned,
        )


def _is_complete(store: Store, attempt: str, history: BranchHistory) -> bool:
    try:
        manifest = rebuild_manifest(store, attempt)
    except (CorruptCheckpointError, NotFoundError):
        return False
    return history.abandoned_by(manifest.generation, manifest.step) is None
