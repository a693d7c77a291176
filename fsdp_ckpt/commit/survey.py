"""All that a run's root holds, for people to look at: in few requests, however many checkpoints there are.

    root --one listing--> steps --one listing of all their folders--> sizes, marks --a manifest each--> rows

Invariant: what is a checkpoint, and whole, is what ``catalog`` says. On a store that lists in bulk (S3) a
survey takes at most two requests per thousand objects, one per checkpoint looked at, and one per rollback.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from fsdp_ckpt.commit.branches import BranchHistory
from fsdp_ckpt.commit.catalog import (
    CheckpointInfo,
    SkippedCheckpoint,
    list_root,
    list_steps,
    look_at,
    step_folder,
)
from fsdp_ckpt.commit.marks import MarkKind, read_marks
from fsdp_ckpt.commit.rollback import read_history
from fsdp_ckpt.manifest.layout_names import prevailing_layout
from fsdp_ckpt.storage.store import BulkLister, Store

__all__ = ["Survey", "SurveyedCheckpoint", "survey_root"]

# While one thread parses a manifest, another one waits for the next.
THREADS_PER_READ = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SurveyedCheckpoint:
    """A whole checkpoint.

    Args:
        info: What it is.
        marks: What has been said of it since.
        layout: The one that holds most of its bytes, such as ``S0 over 8``.
    """

    info: CheckpointInfo
    marks: frozenset[MarkKind]
    layout: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What a root holds.

    Args:
        checkpoints: Whole ones of the current branch, newest first.
        skipped: The other steps' folders that were looked at, newest first.
        num_older: Steps' folders that were not looked at.
    """

    checkpoints: tuple[SurveyedCheckpoint, ...]
    skipped: tuple[SkippedCheckpoint, ...]
    num_older: int


def survey_root(root: Store, limit: int | None = None) -> Survey:
    """Look at the newest steps of a run.

    Args:
        root: The run's root.
        limit: How many at most; all by default.

    Raises:
        CorruptCheckpointError: A rollback's record is damaged or missing.
        StorageError: The root, or a manifest in it, cannot be read now; never taken for damage.
    """
    bulk = root if isinstance(root, BulkLister) else None
    folders, names = list_root(root)
    history, steps = read_history(root, names), list_steps(root, folders)
    chosen = steps[:limit]
    trees = bulk.list_trees([step_folder(step) for step in chosen]) if bulk else {}

    def look(step: int) -> SurveyedCheckpoint | SkippedCheckpoint:
        folder = step_folder(step)
        return _look(root.child(folder), step, history, trees.get(folder))

    with ThreadPoolExecutor(THREADS_PER_READ * root.concurrency, "fsdp_ckpt-survey") as threads:
        found = list(threads.map(look, chosen))
    return Survey(
        checkpoints=tuple(f for f in found if isinstance(f, SurveyedCheckpoint)),
        skipped=tuple(f for f in found if isinstance(f, SkippedCheckpoint)),
        num_older=len(steps) - len(chosen),
    )


def _look(
    store: Store, step: int, history: BranchHistory, sizes: Mapping[str, int] | None
) -> SurveyedCheckpoint | SkippedCheckpoint:
    found, manifest = look_at(store, step, history, sizes)
    if isinstance(found, SkippedCheckpoint):
        return found
    assert manifest is not None  # a whole one has it
    marks = read_marks(store, found.attempt, names=sizes)
    return SurveyedCheckpoint(info=found, marks=marks.kinds, layout=prevailing_layout(manifest))
