"""Which job goes on under a root: attempts of those before it are dead from then on.

    ROOT/resumed-20260131T093000250000-1b9d6bcd52a1.json      id of the first attempt that a job published

An attempt's id is the time, as far as the clocks of coordinators agree, and a token of its job. A writer that
finishes late, or a coordinator that was cut off and comes back, must not put a branch that the run has left
on top of the one it is on.

Invariant: a job's fence is there before its first manifest; fences only rise, and stay.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass

from fsdp_ckpt.errors import AlreadyCommittedError, IncompleteWriteError
from fsdp_ckpt.storage.store import Store

__all__ = ["Fences", "pass_fence", "read_fences"]

_FENCE = re.compile(r"resumed-([A-Za-z0-9][A-Za-z0-9_.-]*)\.json", re.ASCII)

# By root: the fence that this process has raised. Its managers are one job.
_raised: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class Fences:
    """The fences of a root, in order."""

    ids: tuple[str, ...]

    def is_dead(self, attempt: str) -> bool:
        """Whether an attempt is of a job that another one has followed."""
        if not self.ids:
            return False
        *earlier, newest = self.ids
        followed = {_token(fence) for fence in earlier} - {_token(newest)}
        return attempt < newest or _token(attempt) in followed


def _token(attempt: str) -> str:
    return attempt.rpartition("-")[2]


def read_fences(root: Store) -> Fences:
    """Return the fences of a root.

    Raises:
        StorageError: The root cannot be read now.
    """
    found = (_FENCE.fullmatch(name) for name in root.list_files())
    return Fences(tuple(sorted(match[1] for match in found if match)))


def pass_fence(root: Store, attempt: str) -> None:
    """Make sure that this job is the one that goes on, before it publishes; called by the coordinator.

    Args:
        root: The run's root.
        attempt: About to be published; the first one of a process becomes its fence.

    Raises:
        IncompleteWriteError: Another job has published under this root since this one began.
        StorageError: The root cannot be read or written now.
    """
    mine = _raised.get(root.url, "")
    newest = max(read_fences(root).ids, default="")
    if newest > (mine or attempt):
        raise IncompleteWriteError(
            f"{root.url}: another job has gone on under this root since this one began (its first save is "
            f"{newest}); end one of them, or give each a root of its own",
            attempt=attempt,
        )
    if not mine:
        with suppress(AlreadyCommittedError):  # an answer that was lost: the id is ours alone
            root.create(f"resumed-{attempt}.json", b"{}")
        _raised[root.url] = attempt
