"""Which checkpoint a restore takes.

    newest of the branch ──> torn, but complete? published ──> damaged? marked, passed over ──> the one before

Invariant: a root that cannot be read is an error, never an empty one; damage is passed over only where no
step was asked for. Runs on the coordinator alone.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from fsdp_ckpt.commit.catalog import (
    CheckpointInfo,
    SkippedCheckpoint,
    find_checkpoints,
    list_root,
    step_folder,
)
from fsdp_ckpt.commit.checkpoint import Checkpoint
from fsdp_ckpt.commit.current_branch import CurrentBranch
from fsdp_ckpt.commit.fence import read_fences
from fsdp_ckpt.commit.marks import add_mark
from fsdp_ckpt.commit.publish import holds_checkpoint, publish_manifest, read_manifest
from fsdp_ckpt.commit.recover import find_complete_attempt
from fsdp_ckpt.commit.rollback import history_to_json
from fsdp_ckpt.errors import (
    AlreadyCommittedError,
    CheckpointError,
    CorruptCheckpointError,
    NotFoundError,
    StorageError,
    UnsupportedFormatError,
)
from fsdp_ckpt.restoring.report import Allowed
from fsdp_ckpt.storage.store import Store

__all__ = ["CheckpointFinder"]

logger = logging.getLogger("fsdp_ckpt")


class CheckpointFinder:
    """Looks for checkpoints under one root.

    Args:
        root: The run's root.
        branch: On which this job saves.
    """

    def __init__(self, root: Store, branch: CurrentBranch) -> None:
        self._root = root
        self._branch = branch

    def choose(
        self, step: int | None, damaged: Mapping[tuple[int, str], str], allowed: Allowed
    ) -> dict[str, Any]:
        """Choose the checkpoint to restore, as JSON for all ranks.

        Args:
            step: Asked for; ``None`` for the newest that is whole.
            damaged: (step, attempt) -> why: found out while they were read.
            allowed: What may be passed over.

        Raises:
            CheckpointError: See :meth:`fsdp_ckpt.CheckpointManager.restore`.
        """
        folders, names = list_root(self._root)
        rollbacks = history_to_json(self._branch.look_again(names))
        found = (
            self._find_newest(folders, damaged, allowed)
            if step is None
            else self._find_step(step, folders)
        )
        return {"skipped": [], "is_newest": True, **found, "rollbacks": rollbacks}

    def _find_newest(
        self,
        folders: Iterable[str],
        damaged: Mapping[tuple[int, str], str],
        allowed: Allowed,
    ) -> dict[str, Any]:
        skipped: list[SkippedCheckpoint] = []
        for found in find_checkpoints(self._root, self._branch.history, folders):
            if isinstance(found, SkippedCheckpoint) and found.torn:
                found = self._recover(found.step) or found
            if isinstance(found, SkippedCheckpoint):
                if found.newer:
                    # Not damage: going on from an older one would throw away a good checkpoint.
                    raise UnsupportedFormatError(found.reason, step=found.step)
                skipped.append(found)
            elif (reason := damaged.get((found.step, found.attempt))) is not None:
                self.mark_corrupt(found.step, found.attempt, reason)
                skipped.append(
                    SkippedCheckpoint(step=found.step, reason=reason, attempt=found.attempt)
                )
            else:
                passed = [dataclasses.asdict(s) for s in skipped]
                return {"step": found.step, "attempt": found.attempt, "skipped": passed}
        broken = [s for s in skipped if not s.torn and not s.abandoned]
        if broken:
            raise CorruptCheckpointError(
                f"{self._root.url}: no whole checkpoint among {len(skipped)}; the newest: {broken[0].reason}",
                step=broken[0].step,
            )
        left = [s for s in skipped if s.abandoned]
        if left:
            raise NotFoundError(
                f"{self._root.url}: no checkpoint on the branch that the run is on, only {len(left)} on "
                f"those it has left, the newest of step {left[0].step}; name one by step",
                step=left[0].step,
            )
        if skipped and not allowed.torn:
            raise NotFoundError(
                f"{self._root.url}: no checkpoint, only {len(skipped)} torn attempt(s), the newest of step "
                f"{skipped[0].step}; to start the run anew, pass allow_torn=True or another root"
            )
        return {"step": None, "skipped": [dataclasses.asdict(s) for s in skipped]}

    def _recover(self, step: int) -> CheckpointInfo | None:
        """Publish what a job that died left complete."""
        store = self._root.child(step_folder(step))
        manifest = find_complete_attempt(store, read_fences(self._root), self._branch.history)
        if manifest is None:
            return None
        try:
            publish_manifest(store, manifest)
        except AlreadyCommittedError:  # someone has, just now
            manifest = read_manifest(store)
        except StorageError as e:
            if e.retryable:
                raise
            # A root that may only be read.
            logger.warning("could not publish the complete attempt of step %d: %s", step, e)
            return None
        else:
            logger.warning(
                "published attempt %s of step %d, which a job that died had written completely",
                manifest.attempt,
                step,
            )
        return CheckpointInfo.of(manifest, store.url)

    def mark_corrupt(self, step: int, attempt: str, reason: str) -> None:
        """Let whoever comes next know; a root that may only be read stays as it is."""
        try:
            add_mark(self._root, step, attempt, "corrupt", note=reason)
        except CheckpointError as e:
            logger.warning("could not mark step %d as damaged: %s", step, e)

    def _find_step(self, step: int, folders: Iterable[str]) -> dict[str, Any]:
        store = self._root.child(step_folder(step))
        try:
            if not holds_checkpoint(store):
                self._recover(step)
            checkpoint = Checkpoint.open(store)
        except NotFoundError as e:
            found = find_checkpoints(self._root, self._branch.history, folders)
            there = [str(info.step) for info in found if isinstance(info, CheckpointInfo)]
            shown = ", ".join(there[:5]) or "none"
            raise NotFoundError(
                f"{self._root.url}: no checkpoint of step {step}; newest steps there: {shown}",
                step=step,
            ) from e
        except CorruptCheckpointError as e:
            raise CorruptCheckpointError(f"step {step}: {e}", step=step, key=e.key) from e
        if checkpoint.manifest.step != step:
            raise CorruptCheckpointError(
                f"{checkpoint.store.url}: the manifest is of step {checkpoint.manifest.step}",
                step=step,
            )
        checkpoint.check_files()
        attempt = checkpoint.manifest.attempt
        return {
            "step": step,
            "attempt": attempt,
            "is_newest": self._branch.newest_attempt(folders) == attempt,
        }
