"""Rollbacks on storage: one create-only object each makes a run go back.

    ROOT/rollback-0001.json      the run left its branch; what it saves from then on is of generation 1

Invariant: there are records 1 to n without a gap, and none is ever changed. Before record n is there the run
is on branch n - 1, from then on it is on branch n, whatever dies in between.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Sequence
from typing import Any

from fsdp_ckpt.commit.branches import BranchHistory, DataWindow, Rollback
from fsdp_ckpt.commit.fence import pass_fence
from fsdp_ckpt.commit.publish import create_or_find, new_attempt
from fsdp_ckpt.commit.records import read_record, record_to_bytes
from fsdp_ckpt.errors import (
    AlreadyCommittedError,
    CorruptCheckpointError,
)
from fsdp_ckpt.manifest.fields import count, text
from fsdp_ckpt.storage.store import Store

__all__ = [
    "history_from_json",
    "history_to_json",
    "read_history",
    "record_rollback",
    "rollback_key",
]

KIND = "rollback"
_RECORD = re.compile(r"rollback-(\d{4,9})\.json", re.ASCII)
MAX_REASON = 500


def rollback_key(generation: int) -> str:
    """Return the name of a rollback's record, in the root."""
    return f"rollback-{generation:04d}.json"


def read_history(root: Store, names: Iterable[str] | None = None) -> BranchHistory:
    """Return the rollbacks of a run.

    Args:
        root: The run's root.
        names: Of its files, where they were listed already.

    Raises:
        CorruptCheckpointError: A record is damaged or missing: which branch is the current one is not known.
        UnsupportedFormatError: One is of a newer version.
        StorageError: The root cannot be read now. An absent root has no rollbacks.
    """
    found = (_RECORD.fullmatch(name) for name in (root.list_files() if names is None else names))
    numbers = sorted(int(m[1]) for m in found if m and m[0] == rollback_key(int(m[1])))
    for expected, number in enumerate(numbers, 1):
        if number != expected:
            raise CorruptCheckpointError(
                f"{root.url}: {rollback_key(number)} is there, {rollback_key(expected)} is not: which branch "
                "the run is on is not known; bring the record back",
                key=rollback_key(expected),
            )
    return BranchHistory(tuple(_read_rollback(root, number) for number in numbers))


def record_rollback(
    root: Store,
    history: BranchHistory,
    *,
    from_step: int,
    to_step: int,
    attempt: str,
    reason: str,
    skip: Sequence[DataWindow] = (),
    lr_factor: float = 1.0,
    lr_steps: int = 0,
) -> BranchHistory:
    """Let the run go back: durable when this returns. Called by the coordinator.

    Also for a run that goes on, by hand, from a checkpoint that is not the newest: without data to skip.

    Args:
        root: The run's root.
        history: As the run knows it.
        from_step: Where it is.
        to_step: Step of the checkpoint that it goes back to, of the current branch.
        attempt: Of that checkpoint.
        reason: One line; cut at 500 characters.
        skip: Data to leave out from then on.
        lr_factor: What the learning rate is multiplied with, for a while.
        lr_steps: For how many steps after ``to_step``.

    Returns:
        The history with it.

    Raises:
        AlreadyCommittedError: Someone else has gone back since ``history`` was read.
        IncompleteWriteError: Another job has gone on under this root.
        StorageError: It could not be written, and is not there.
        ValueError: More windows than a record holds, or steps that do not fit; nothing was written.
    """
    rollback = Rollback(
        generation=history.generation + 1,
        id=new_attempt(),
        from_step=from_step,
        to_step=to_step,
        attempt=attempt,
        reason=" ".join(reason.split())[:MAX_REASON],
        skip=tuple(skip),
        lr_factor=lr_factor,
        lr_steps=lr_steps,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    content = record_to_bytes(KIND, _to_json(rollback))
    # A job that another one has followed must not turn that one's branch over.
    pass_fence(root, rollback.id)
    _create(root, rollback, content)
    return BranchHistory((*history.rollbacks, rollback))


def history_to_json(history: BranchHistory) -> list[dict[str, Any]]:
    """Return plain data, for other ranks."""
    return [_to_json(rollback) for rollback in history.rollbacks]


def history_from_json(encoded: Sequence[dict[str, Any]]) -> BranchHistory:
    """Rebuild what :func:`history_to_json` described."""
    return BranchHistory(tuple(_from_json(fields) for fields in encoded))


def _create(root: Store, rollback: Rollback, content: bytes) -> None:
    """Write the record, unless there is one of that number."""
    key = rollback_key(rollback.generation)
    taken = create_or_find(
        root, key, content, rollback.id, lambda: _read_rollback(root, rollback.generation).id
    )
    if taken is not None:
        raise AlreadyCommittedError(
            f"{root.url}/{key}: another rollback is recorded there; restart from what it says",
            key=key,
        ) from taken


def _to_json(rollback: Rollback) -> dict[str, Any]:
    return {
        "generation": rollback.generation,
        "id": rollback.id,
        "from": rollback.from_step,
        "to": rollback.to_step,
        "attempt": rollback.attempt,
        "reason": rollback.reason,
        "skip": [[w.epoch, w.start, w.stop] for w in rollback.skip],
        "lr": [rollback.lr_factor, rollback.lr_steps],
        "created": rollback.created,
    }


def _read_rollback(root: Store, number: int) -> Rollback:
    key = rollback_key(number)
    fields = read_record(root, key, KIND)
    try:
        rollback = _from_json(fields)
    except (CorruptCheckpointError, KeyError, TypeError, ValueError) as e:
        raise CorruptCheckpointError(
            f"{root.url}/{key}: malformed rollback ({type(e).__name__}: {e})", key=key
        ) from e
    if rollback.generation != number:
        raise CorruptCheckpointError(
            f"{root.url}/{key}: the record of rollback {rollback.generation}", key=key
        )
    return rollback


def _from_json(fields: dict[str, Any]) -> Rollback:
    factor, steps = fields["lr"]
    if type(factor) not in (int, float):
        raise CorruptCheckpointError("a learning rate's factor that is no number")
    return Rollback(
        generation=count(fields["generation"]),
        id=text(fields["id"]),
        from_step=count(fields["from"]),
        to_step=count(fields["to"]),
        attempt=text(fields["attempt"]),
        reason=text(fields["reason"]),
        skip=tuple(
            DataWindow(epoch=count(epoch), start=count(start), stop=count(stop))
            for epoch, start, stop in fields["skip"]
        ),
        lr_factor=float(factor),
        lr_steps=count(steps),
        created=text(fields["created"]),
    )
