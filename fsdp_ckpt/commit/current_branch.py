"""The branch on which this job saves.

    restore ──> stands_on          the newest of the branch, or not
    save    ──> settle             not the newest: the run goes back first, on record
    publish ──> check_publish      is the branch still the current one?

Invariant: what is published is of the current branch, and lies beyond the step at which that began. Only the
coordinator uses it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fsdp_ckpt.commit.branches import BranchHistory
from fsdp_ckpt.commit.catalog import CheckpointInfo, find_checkpoints
from fsdp_ckpt.commit.publish import read_manifest, retire_manifest
from fsdp_ckpt.commit.receipt import Attempt
from fsdp_ckpt.commit.rollback import read_history, record_rollback
from fsdp_ckpt.errors import CorruptCheckpointError, NotFoundError, UnsupportedFormatError
from fsdp_ckpt.storage.store import Store

__all__ = ["CurrentBranch"]


class CurrentBranch:
    """Which branch a job is on.

    Args:
        root: The run's root.
    """

    def __init__(self, root: Store) -> None:
        self._root = root
        self._history: BranchHistory | None = None
        # Restored, and not the newest of the branch: to be put on record before the first save.
        self._older: tuple[int, str] | None = None

    @property
    def history(self) -> BranchHistory:
        """The run's rollbacks as this job knows them; read at first use.

        Raises:
            CorruptCheckpointError: A record is damaged or missing.
            StorageError: The root cannot be read now.
        """
        if self._history is None:
            self._history = read_history(self._root)
        return self._history

    def look_again(self, names: Iterable[str]) -> BranchHistory:
        """Read the rollbacks anew, as a restore does; ``names``: of the root's files, listed just now."""
        self._history = read_history(self._root, names)
        return self._history

    def newest_attempt(self, folders: Iterable[str]) -> str | None:
        """Return the attempt of the newest whole checkpoint of the branch, by file sizes.

        Args:
            folders: Names of the root's folders, listed just now.
        """
        found = find_checkpoints(self._root, self.history, folders)
        return next((f.attempt for f in found if isinstance(f, CheckpointInfo)), None)

    def stands_on(self, step: int, attempt: str, *, is_newest: bool) -> None:
        """Note which checkpoint the live state is that of."""
        self._older = None if is_newest else (step, attempt)

    def roll_back(self, **what: Any) -> BranchHistory:
        """Let the run go back; see :func:`~fsdp_ckpt.commit.rollback.record_rollback`."""
        self._history = record_rollback(self._root, self.history, **what)
        self._older = None
        return self._history

    def settle(self, step: int) -> int:
        """Put on record what is to be, and return the generation that ``step`` is of.

        Whoever goes on from a checkpoint that is not the newest has gone back: the next restart must not take
        what was meant to be left.
        """
        if self._older is not None and step > self._older[0]:
            to_step, attempt = self._older
            reason = f"went on from step {to_step}, which was asked for"
            self.roll_back(from_step=step, to_step=to_step, attempt=attempt, reason=reason)
        return self.history.generation

    def is_left(self, store: Store) -> bool:
        """Whether a step's folder holds a checkpoint of a branch that the run has left."""
        return _left_attempt(store, self.history) is not None

    def check_publish(self, attempt: Attempt, store: Store) -> None:
        """Make sure that a save is of the current branch, and put one of another branch aside.

        Args:
            attempt: About to be published.
            store: Its step's folder.

        Raises:
            IncompleteWriteError: The run has gone back since the save began.
            AlreadyCommittedError: Another checkpoint has come there just now.
            StorageError: The root cannot be read or written now.
        """
        history = read_history(self._root)
        history.check_save(attempt.generation, attempt.step)
        left = _left_attempt(store, history)
        if left is not None:
            retire_manifest(store, left)


def _left_attempt(store: Store, history: BranchHistory) -> str | None:
    if not history.rollbacks:
        return None
    try:
        manifest = read_manifest(store)
    except (NotFoundError, CorruptCheckpointError, UnsupportedFormatError):
        return None
    is_left = history.abandoned_by(manifest.generation, manifest.step) is not None
    return manifest.attempt if is_left else None
