"""Deleting what a policy does not keep, so that a crash leaves each checkpoint whole or gone.

    mark it as pruned ─> no pin meanwhile? ─> delete its manifest ─> its files ─> its marks, "pruned" last

Invariant: a file is deleted only when no manifest names it. The mark says that what is left of an attempt is
to go, so that the next run finishes what one that died had begun: a half-deleted attempt looks like one that
is being written.
"""

from __future__ import annotations

import re
import time
from collections.abc import Container, Iterable
from functools import partial

from fsdp_ckpt.commit.catalog import step_folder
from fsdp_ckpt.commit.inventory import take_inventory
from fsdp_ckpt.commit.marks import add_mark, mark_key, mark_of, read_marks
from fsdp_ckpt.commit.publish import MANIFEST_KEY, read_manifest
from fsdp_ckpt.commit.retention import Doomed, PrunePlan, RetentionPolicy, choose_what_to_delete
from fsdp_ckpt.errors import CorruptCheckpointError, NotFoundError, UnsupportedFormatError
from fsdp_ckpt.manifest.schema import shard_name
from fsdp_ckpt.storage.shard_io import run_all
from fsdp_ckpt.storage.store import Store

__all__ = ["delete_doomed", "prune"]

_UNKNOWN = ""  # no attempt's id
# What saves, repairs and this module leave beside a manifest; other files are someone else's.
_OURS = re.compile(r"manifest\.json(\.[0-9a-f]+\.tmp|\.claim)|damaged-[0-9a-f]{12}\.json", re.ASCII)


def prune(
    root: Store,
    policy: RetentionPolicy,
    *,
    resumed_from: str | None = None,
    is_judged: bool = False,
    now_s: float | None = None,
    dry_run: bool = False,
) -> PrunePlan:
    """Delete what a policy does not keep. Called by the coordinator after a publish, or by a person.

    Jobs may save, restore, pin and prune meanwhile. Only what was published before this call counts.

    Args:
        root: The run's root.
        policy: What to keep.
        resumed_from: Attempt of the checkpoint that the run was resumed from, where known.
        is_judged: Whether the run finds out which checkpoints are good: none is by default then.
        now_s: Seconds since 1970; by default this machine's clock.
        dry_run: Decide only.

    Returns:
        What was decided, and deleted unless ``dry_run``.

    Raises:
        CorruptCheckpointError: The record of a rollback or of a score is damaged; nothing was deleted.
        UnsupportedFormatError: One is of a newer version; nothing was deleted.
        StorageError: The store failed; the next call finishes.
    """
    inventory = take_inventory(root, with_metrics=policy.metric is not None)
    plan = choose_what_to_delete(
        inventory,
        policy,
        now_s=time.time() if now_s is None else now_s,
        resumed_from=resumed_from,
        is_judged=is_judged,
    )
    if not dry_run:
        delete_doomed(root, plan.delete)
        _forget_old_intent(root, plan, inventory.half_deleted)
    return plan


def delete_doomed(root: Store, doomed: Iterable[Doomed]) -> None:
    """Carry a decision out; deleting twice is fine.

    Raises:
        StorageError: The store failed; what was not deleted yet is still decided.
    """
    for item in doomed:
        store = root.child(step_folder(item.step))
        if item.what == "checkpoint":
            is_gone = _retire(root, store, item)
        else:
            # A restore may have published it since it was looked at.
            is_gone = _named_attempt(store) not in (item.attempt, _UNKNOWN)
        if not is_gone:
            continue
        _delete_files(store, item.attempt)
        _delete_marks(store, item.attempt)


def _retire(root: Store, store: Store, doomed: Doomed) -> bool:
    """Let a checkpoint cease to exist; return ``False`` where it has been pinned or replaced meanwhile."""
    add_mark(root, doomed.step, doomed.attempt, "pruned", note=doomed.reason)
    pruned = mark_key("pruned", doomed.attempt)
    # Who pins does it in the other order: see marks.
    if "pinned" in read_marks(store, doomed.attempt).kinds:
        store.delete(pruned)
        return False
    found = _named_attempt(store)
    if found == doomed.attempt:
        store.delete(MANIFEST_KEY)
    elif found is not None:
        store.delete(pruned)
        return False
    return True  # perhaps another prune has come this far


def _named_attempt(store: Store) -> str | None:
    """Return the attempt that a manifest names; ``None`` without one."""
    try:
        return read_manifest(store).attempt
    except NotFoundError:
        return None
    except (CorruptCheckpointError, UnsupportedFormatError):
        return _UNKNOWN


def _delete_files(store: Store, attempt: str) -> None:
    """Delete an attempt's files; rank 0's first, without which no one takes it for complete."""
    names = sorted(store.child(attempt).list_files())
    # What is not there is no error, and a local store then removes the empty folder.
    first, *others = [f"{attempt}/{name}" for name in names] or [shard_name(attempt, 0, 1)]
    store.delete(first)
    run_all(
        (partial(store.delete, key) for key in others),
        min(store.concurrency, len(others)) or 1,
    )


def _delete_marks(store: Store, attempt: str) -> None:
    """Delete an attempt's marks, and what else is ours where nothing but that is left."""
    names, folders = store.list_files(), store.list_folders()
    if MANIFEST_KEY not in names and not any(map(_holds_files, map(store.child, folders))):
        for name in filter(_OURS.fullmatch, names):
            store.delete(name)
    pruned = mark_key("pruned", attempt)
    for name in names:
        mark = mark_of(name)
        if mark is not None and mark[1] == attempt and name != pruned:
            store.delete(name)
    # Last, whether or not it is there: a local store then removes the folder, if it is empty.
    store.delete(pruned)


def _holds_files(store: Store) -> bool:
    """Whether a folder is more than a name: some stores keep the name of an empty one."""
    return bool(store.list_files())


def _forget_old_intent(root: Store, plan: PrunePlan, half_deleted: Container[str]) -> None:
    """Take the mark of a deletion that never came to the manifest from what is to stay."""
    for kept in plan.keep:
        if kept.attempt in half_deleted:
            root.child(step_folder(kept.step)).delete(mark_key("pruned", kept.attempt))
