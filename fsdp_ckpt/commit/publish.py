"""One conditional write makes a checkpoint exist.

Invariant: ``manifest.json`` is there if and only if the checkpoint is. Shard files stand in a folder named
by the attempt; nothing of an attempt is ever reused, renamed or rewritten, so a dead attempt can never mix
with a later one.
"""

from __future__ import annotations

import datetime
import os
import threading
import uuid
from collections.abc import Callable

from fsdp_ckpt.errors import (
    AlreadyCommittedError,
    CheckpointError,
    NotFoundError,
    StorageError,
)
from fsdp_ckpt.manifest.schema import MAX_MANIFEST_BYTES, Manifest
from fsdp_ckpt.storage.store import Store

__all__ = [
    "MANIFEST_KEY",
    "holds_checkpoint",
    "new_attempt",
    "publish_manifest",
    "read_manifest",
    "refuse_committed",
    "retire_manifest",
]

MANIFEST_KEY = "manifest.json"

_lock = threading.Lock()
_newest = datetime.datetime.min.replace(tzinfo=datetime.UTC)
_token = uuid.uuid4().hex[:12]


def _renew_token() -> None:
    """Let a forked process be a job of its own."""
    global _token, _lock
    _token, _lock = uuid.uuid4().hex[:12], threading.Lock()


os.register_at_fork(after_in_child=_renew_token)


def new_attempt() -> str:
    """Return a unique attempt id, such as ``20260131T093000250000-1b9d6bcd0f3a``.

    The time (UTC, microseconds), by which ids sort, and a token of this process, which is one job's.
    """
    global _newest
    with _lock:
        now = datetime.datetime.now(datetime.UTC)
        _newest = now = max(now, _newest + datetime.timedelta(microseconds=1))
    return f"{now:%Y%m%dT%H%M%S%f}-{_token}"


def refuse_committed(store: Store, step: int | None = None) -> None:
    """Raise if a checkpoint exists here already, before anything is written.

    Raises:
        AlreadyCommittedError: It does.
    """
    if holds_checkpoint(store):
        raise _already_committed(store, step)


def holds_checkpoint(store: Store) -> bool:
    """Whether a manifest is there.

    Raises:
        StorageError: The store cannot be read now.
    """
    try:
        store.size(MANIFEST_KEY)
    except NotFoundError:
        return False
    return True


def retire_manifest(store: Store, attempt: str | None) -> None:
    """Take a damaged checkpoint's manifest away, so that its step can be saved again; its data stays.

    The manifest is kept under another name first, for whoever wants to look into the damage.

    Args:
        store: The checkpoint's folder.
        attempt: Which checkpoint was found damaged; ``None`` where its manifest could not be read.

    Raises:
        AlreadyCommittedError: Another checkpoint is there by now.
        StorageError: The store failed; the checkpoint may still stand.
    """
    try:
        content = store.read(MANIFEST_KEY)
    except NotFoundError:
        return
    try:
        found = Manifest.from_bytes(content, MANIFEST_KEY).attempt
    except CheckpointError:
        found = None
    if found != attempt:
        raise _already_committed(store, None)
    store.create(f"damaged-{uuid.uuid4().hex[:12]}.json", content)
    store.delete(MANIFEST_KEY)


def publish_manifest(store: Store, manifest: Manifest) -> None:
    """Make the checkpoint exist: write its manifest, create-only.

    A lost answer is resolved by reading back: the attempt id tells whose manifest it is.

    Args:
        store: The checkpoint's folder.
        manifest: With the rows of all files, which are durable.

    Raises:
        AlreadyCommittedError: Another attempt was published first.
        StorageError: It could not be written, and is not there.
    """
    taken = create_or_find(
        store,
        MANIFEST_KEY,
        manifest.to_bytes(),
        manifest.attempt,
        lambda: read_manifest(store).attempt,
    )
    if taken is not None:
        raise _already_committed(store, manifest.step) from taken


def create_or_find(
    store: Store, key: str, content: bytes, own_id: str, read_id: Callable[[], str]
) -> Exception | None:
    """Create an object; a lost answer is resolved by reading back: the id tells whose it is.

    Args:
        store: Where to.
        key: Of the object.
        content: Of the object; has an id.
        own_id: That id, unique.
        read_id: Reads the id of what is there.

    Returns:
        ``None`` where ours is there; where another one is, the store's error.

    Raises:
        StorageError: It could not be written, and nothing that can be read is there.
    """
    try:
        store.create(key, content)
    except (AlreadyCommittedError, StorageError) as error:
        try:
            found: str | None = read_id()
        except CheckpointError:
            found = None
        if found == own_id:
            return None
        if found is None and isinstance(error, StorageError):
            raise
        return error
    return None


def _already_committed(store: Store, step: int | None) -> AlreadyCommittedError:
    return AlreadyCommittedError(
        f"{store.url}: a checkpoint exists here already; save under another step or path, or delete it",
        step=step,
    )


def read_manifest(store: Store) -> Manifest:
    """Read and check a checkpoint's manifest.

    Raises:
        NotFoundError: No checkpoint here.
        CorruptCheckpointError: The manifest is damaged.
        UnsupportedFormatError: It is of a newer format version.
    """
    try:
        content = store.read(MANIFEST_KEY, MAX_MANIFEST_BYTES)
    except NotFoundError as e:
        raise NotFoundError(f"{store.url}: no checkpoint here (no {MANIFEST_KEY})") from e
    return Manifest.from_bytes(content, f"{store.url}/{MANIFEST_KEY}")
