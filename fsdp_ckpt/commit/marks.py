"""What is known about a checkpoint after its commit: small create-only objects beside its manifest.

    step-000000500/good-<attempt>.json        training went on well from there
    step-000000500/pinned-<attempt>.json      kept until it is unpinned
    step-000000500/scored-<attempt>.json      metrics, by which the best ones are kept
    step-000000500/corrupt-<attempt>.json     a restore found its data damaged
    step-000000500/pruned-<attempt>.json      its deletion has begun

Invariant: a mark names the attempt, so it never passes to another checkpoint of the same step. Names alone
tell which marks there are. Who does not know a kind of mark passes it over.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from fsdp_ckpt.commit.catalog import step_folder
from fsdp_ckpt.commit.publish import holds_checkpoint, read_manifest
from fsdp_ckpt.commit.records import read_record, record_to_bytes
from fsdp_ckpt.errors import AlreadyCommittedError, CorruptCheckpointError, NotFoundError
from fsdp_ckpt.manifest.fields import shown
from fsdp_ckpt.storage.store import Store

__all__ = [
    "MarkKind",
    "Marks",
    "add_mark",
    "mark_key",
    "mark_of",
    "pin",
    "read_marks",
    "remove_mark",
    "unpin",
]

MarkKind: TypeAlias = Literal["good", "pinned", "scored", "corrupt", "pruned"]
_MARK = re.compile(
    rf"({'|'.join(get_args(MarkKind))})-([A-Za-z0-9][A-Za-z0-9_.-]*)\.json", re.ASCII
)
MAX_NOTE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Of one checkpoint.

    Args:
        kinds: Which there are.
        metrics: Name → value, where it is scored.
    """

    kinds: frozenset[MarkKind] = frozenset()
    metrics: Mapping[str, float] = field(default_factory=dict)


def mark_key(kind: MarkKind, attempt: str) -> str:
    """Return the name of a mark, in its step's folder."""
    return f"{kind}-{attempt}.json"


def mark_of(name: str) -> tuple[MarkKind, str] | None:
    """Return kind and attempt of the mark that a file is; ``None`` if it is none."""
    match = _MARK.fullmatch(name)
    # The pattern lists the kinds.
    return (match[1], match[2]) if match else None  # type: ignore[return-value]


def add_mark(
    root: Store,
    step: int,
    attempt: str,
    kind: MarkKind,
    *,
    note: str = "",
    metrics: Mapping[str, float] | None = None,
) -> bool:
    """Mark a checkpoint; durable when this returns. Called by one rank.

    Args:
        root: The run's root.
        step: Of the checkpoint.
        attempt: Of the checkpoint.
        kind: What is to be said of it.
        note: One line for people; cut at 500 characters.
        metrics: Of kind ``scored``: name → value.

    Returns:
        Whether the mark is new; the first one stays.

    Raises:
        ValueError: A metric is not finite.
        StorageError: It could not be written.
    """
    fields = {
        "step": step,
        "attempt": attempt,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "note": " ".join(note.split())[:MAX_NOTE],
        "metrics": {name: float(value) for name, value in (metrics or {}).items()},
    }
    try:
        root.child(step_folder(step)).create(mark_key(kind, attempt), record_to_bytes(kind, fields))
    except AlreadyCommittedError:
        return False
    return True


def remove_mark(root: Store, step: int, attempt: str, kind: MarkKind) -> None:
    """Take a mark away; none there is fine.

    Raises:
        StorageError: The store failed; the mark may still stand.
    """
    root.child(step_folder(step)).delete(mark_key(kind, attempt))


def read_marks(
    store: Store,
    attempt: str,
    *,
    names: Iterable[str] | None = None,
    with_metrics: bool = False,
) -> Marks:
    """Return the marks of one checkpoint.

    Args:
        store: Its folder.
        attempt: Of the checkpoint; marks of others are passed over.
        names: Of the folder's files, where they were listed already.
        with_metrics: Read the scores too; otherwise names are enough.

    Raises:
        CorruptCheckpointError: Its scores are damaged.
        UnsupportedFormatError: Its scores are of a newer version.
        StorageError: The folder cannot be read now.
    """
    found = (mark_of(name) for name in (store.list_files() if names is None else names))
    kinds = frozenset(mark[0] for mark in found if mark and mark[1] == attempt)
    metrics = _read_metrics(store, attempt) if with_metrics and "scored" in kinds else {}
    return Marks(kinds=kinds, metrics=metrics)


def pin(root: Store, step: int, note: str = "") -> bool:
    """Keep the checkpoint of a step whatever the policy, until its mark ``pinned`` is removed.

    Returns:
        Whether it was not pinned before.

    Raises:
        NotFoundError: No checkpoint of this step, or it is being deleted.
        CorruptCheckpointError: Its manifest is damaged.
        StorageError: The store cannot be read or written now.
    """
    store = root.child(step_folder(step))
    attempt = read_manifest(store).attempt
    is_new = add_mark(root, step, attempt, "pinned", note=note)
    # Who deletes says so first and looks for pins then; so one of the two sees the other.
    if "pruned" in read_marks(store, attempt).kinds or not holds_checkpoint(store):
        remove_mark(root, step, attempt, "pinned")
        raise NotFoundError(
            f"{store.url}: the checkpoint is being deleted; pin another one",
            step=step,
            attempt=attempt,
        )
    return is_new


def unpin(root: Store, step: int) -> bool:
    """Keep the checkpoint of a step no longer than the policy says.

    Returns:
        Whether it was pinned.

    Raises:
        NotFoundError: No checkpoint of this step.
        CorruptCheckpointError: Its manifest is damaged.
        StorageError: The store cannot be read or written now.
    """
    store = root.child(step_folder(step))
    attempt = read_manifest(store).attempt
    was_pinned = "pinned" in read_marks(store, attempt).kinds
    remove_mark(root, step, attempt, "pinned")
    return was_pinned


def _read_metrics(store: Store, attempt: str) -> dict[str, float]:
    key = mark_key("scored", attempt)
    try:
        metrics = read_record(store, key, "scored").get("metrics")
    except NotFoundError:  # taken away since it was listed
        return {}
    if not isinstance(metrics, dict) or not all(type(v) in (int, float) for v in metrics.values()):
        raise CorruptCheckpointError(
            f"{store.url}/{key}: metrics are {shown(metrics)}, numbers by name expected", key=key
        )
    return {name: float(value) for name, value in metrics.items()}
