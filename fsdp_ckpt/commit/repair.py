"""Bringing back checkpoints whose data is all there and whose manifest is not.

    no manifest ──────> an attempt that is complete, and of this run's branch? ──> published
    damaged manifest ─> the attempt that it named is complete? ──> put aside, and published anew
    whole ────────────> not touched

Invariant: what is published has all its files, in sizes, headers, coverage and (unless told otherwise) every
block's digest. An attempt that another job has followed is published only where something says that it was
before: the damaged manifest names it, or a mark does. Each try either publishes or changes nothing that a
reader sees, and can be made again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fsdp_ckpt.commit.branches import BranchHistory
from fsdp_ckpt.commit.catalog import list_steps, step_folder
from fsdp_ckpt.commit.checkpoint import Checkpoint
from fsdp_ckpt.commit.fence import Fences, read_fences
from fsdp_ckpt.commit.marks import mark_of
from fsdp_ckpt.commit.publish import MANIFEST_KEY, publish_manifest, retire_manifest
from fsdp_ckpt.commit.recover import rebuild_manifest
from fsdp_ckpt.commit.rollback import read_history
from fsdp_ckpt.commit.verify import find_damage
from fsdp_ckpt.errors import (
    AlreadyCommittedError,
    CorruptCheckpointError,
    NotFoundError,
    UnsupportedFormatError,
)
from fsdp_ckpt.manifest.schema import MAX_MANIFEST_BYTES, Manifest
from fsdp_ckpt.storage.store import Store

__all__ = ["RepairOptions", "StepRepair", "repair_folder", "repair_root", "repair_step"]

State: TypeAlias = Literal["whole", "repaired", "repairable", "beyond"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairOptions:
    """How to repair.

    Args:
        dry_run: Say what would be done, and change nothing.
        reads_data: Prove every block's digest first; sizes and headers are looked at anyway.
        num_threads: Reads in flight.
    """

    dry_run: bool = False
    reads_data: bool = True
    num_threads: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRepair:
    """What was found in a checkpoint's folder, and done.

    Args:
        url: The folder.
        step: Its training step; ``None`` where the folder is not one of a run's.
        state: ``whole``: left alone. ``repaired``: published. ``repairable``: would be. ``beyond``: cannot
            be.
        attempt: Which was, would be, or has always been published.
        reasons: Why it is beyond repair, a line per attempt, newest first; what was wrong where it is not.
    """

    url: str
    step: int | None
    state: State
    attempt: str | None = None
    reasons: tuple[str, ...] = ()


def repair_root(root: Store, options: RepairOptions) -> Iterator[StepRepair]:
    """Repair every step of a run, newest first.

    Args:
        root: The run's root.
        options: How.

    Raises:
        CorruptCheckpointError: The record of a rollback is damaged: which branch is current is not known.
        StorageError: The root cannot be read or written now; what was repaired stays so.
    """
    history, fences = read_history(root), read_fences(root)
    for step in list_steps(root):
        yield _Folder(root.child(step_folder(step)), step, history, fences, options).repair()


def repair_step(root: Store, step: int, options: RepairOptions) -> StepRepair:
    """Repair one step of a run; see :func:`repair_root`.

    Raises:
        NotFoundError: The root has no folder of this step.
    """
    if step not in list_steps(root):
        raise NotFoundError(f"{root.url}: no folder of step {step}", step=step)
    history, fences = read_history(root), read_fences(root)
    return _Folder(root.child(step_folder(step)), step, history, fences, options).repair()


def repair_folder(store: Store, options: RepairOptions) -> StepRepair:
    """Repair a checkpoint that plain ``dcp.save`` has put anywhere: no run, so no later jobs or branches."""
    return _Folder(store, None, BranchHistory(), Fences(()), options).repair()


class _Folder:
    """One checkpoint's folder."""

    def __init__(
        self,
        store: Store,
        step: int | None,
        history: BranchHistory,
        fences: Fences,
        options: RepairOptions,
    ) -> None:
        self._store = store
        self._step = step
        self._history = history
        self._fences = fences
        self._options = options
        self._damaged: bytes | None = None  # the manifest, where it is
        self._marks: set[tuple[str, str]] = set()

    def repair(self) -> StepRepair:
        try:
            return self._look_at(Checkpoint.open(self._store))
        except NotFoundError:
            wrong = f"{MANIFEST_KEY} is not there"
        except UnsupportedFormatError as e:
            return self._beyond(str(e))
        except CorruptCheckpointError as e:
            wrong = str(e)
            try:
                self._damaged = self._store.read(MANIFEST_KEY, MAX_MANIFEST_BYTES)
            except CorruptCheckpointError as too_large:
                return self._beyond(str(too_large))
        return self._bring_back(wrong)

    def _look_at(self, checkpoint: Checkpoint) -> StepRepair:
        """Tell what a manifest that can be read stands for; nothing is changed."""
        manifest = checkpoint.manifest
        if self._step is not None and manifest.step != self._step:
            return self._beyond(f"the manifest is of step {manifest.step}")
        try:
            checkpoint.check_files()
        except CorruptCheckpointError as e:
            return self._beyond(str(e), manifest.attempt)
        return self._outcome("whole", manifest.attempt)

    def _bring_back(self, wrong: str) -> StepRepair:
        marks = (mark_of(name) for name in self._store.list_files())
        self._marks = {mark for mark in marks if mark is not None}
        reasons = []
        for attempt in self._candidates():
            try:
                manifest = self._prove(attempt)
            except (CorruptCheckpointError, NotFoundError, UnsupportedFormatError) as e:
                reasons.append(str(e))
                continue
            if self._options.dry_run:
                return self._outcome("repairable", attempt, wrong)
            try:
                if self._damaged is not None:
                    retire_manifest(self._store, None)
                publish_manifest(self._store, manifest)
            except AlreadyCommittedError as e:  # someone has, just now
                return self._beyond(str(e), attempt)
            return self._outcome("repaired", attempt, wrong)
        return self._beyond(wrong, None, *(reasons or ["there are no shard files either"]))

    def _candidates(self) -> list[str]:
        """Return the attempts that may be brought back, the likeliest first."""
        attempts = self._store.list_folders()
        named = [attempt for attempt in attempts if self._is_named(attempt)]
        # A manifest that names one was that one's.
        if named:
            return named
        return sorted(attempts, key=lambda a: (self._was_published(a), a), reverse=True)

    def _is_named(self, attempt: str) -> bool:
        return self._damaged is not None and f'"attempt":"{attempt}"'.encode() in self._damaged

    def _was_published(self, attempt: str) -> bool:
        """Whether something says that this attempt was a checkpoint once."""
        marked = any(kind != "pruned" and of == attempt for kind, of in self._marks)
        return marked or self._is_named(attempt)

    def _prove(self, attempt: str) -> Manifest:
        """Return an attempt's manifest, once nothing speaks against publishing it.

        Raises:
            NotFoundError: A rank's file is missing, or the attempt is not to be a checkpoint.
            CorruptCheckpointError: A file is not whole.
        """
        where = f"{self._store.url}/{attempt}"
        if ("pruned", attempt) in self._marks:
            raise NotFoundError(f"{where}: its deletion has begun")
        if ("corrupt", attempt) in self._marks and not self._options.reads_data:
            raise NotFoundError(f"{where}: a restore found its data damaged")
        manifest = rebuild_manifest(self._store, attempt, needs_spare=False)
        if self._step is not None and manifest.step != self._step:
            raise CorruptCheckpointError(f"{where}: its files are of step {manifest.step}")
        rollback = self._history.abandoned_by(manifest.generation, manifest.step)
        if rollback is not None:
            raise NotFoundError(
                f"{where}: complete, but of a branch that the run left by rollback {rollback.generation}"
            )
        if self._fences.is_dead(attempt) and not self._was_published(attempt):
            raise NotFoundError(
                f"{where}: complete, but another job has gone on since, and nothing says that it was a "
                "checkpoint before"
            )
        if self._options.reads_data:
            checkpoint = Checkpoint(self._store, manifest)
            for damage in find_damage(checkpoint, self._options.num_threads):
                raise damage
        return manifest

    def _beyond(self, wrong: str, attempt: str | None = None, *reasons: str) -> StepRepair:
        return self._outcome("beyond", attempt, wrong, *reasons)

    def _outcome(self, state: State, attempt: str | None, *reasons: str) -> StepRepair:
        return StepRepair(
            url=self._store.url, step=self._step, state=state, attempt=attempt, reasons=reasons
        )
