"""What stands in an output folder before a run: older weights, what an interrupted run has left, others."""

from __future__ import annotations

import re
from collections.abc import Collection

from fsdp_ckpt.errors import AlreadyCommittedError
from fsdp_ckpt.storage.store import Store

__all__ = ["PARTIAL", "index_name", "leftovers_in", "refuse_occupied", "remove_weights"]

# Hidden from every reader of models.
PARTIAL = ".fsdp-ckpt-partial-"


def leftovers_in(store: Store) -> list[str]:
    """Return the hidden folders and markers of runs that did not end."""
    return [
        name for name in (*store.list_folders(), *store.list_files()) if name.startswith(PARTIAL)
    ]


def refuse_occupied(store: Store, *, allows_leftovers: bool) -> None:
    """Refuse a folder that is not empty.

    Raises:
        AlreadyCommittedError: It holds anything, or what an interrupted run has left and that is not allowed.
    """
    there = [*store.list_files(), *store.list_folders()]
    left = leftovers_in(store)
    others = sorted(set(there) - set(left))
    if others:
        raise AlreadyCommittedError(
            f"{store.url}: not empty, {others[0]} is there already ({len(others)} entries in all); choose "
            "another folder, or overwrite the weights in it",
            key=others[0],
        )
    if left and not allows_leftovers:
        raise AlreadyCommittedError(
            f"{store.url}: an interrupted run has left files in {left[0]}; resume it, or overwrite",
            key=left[0],
        )


def index_name(stem: str) -> str:
    """Return the name of the index of files whose names begin with ``stem``."""
    return f"{stem}.safetensors.index.json"


def remove_weights(store: Store, stem: str, but: Collection[str] = ()) -> None:
    """Remove an older run's files, the index first: without it no one takes the others for a model.

    Args:
        store: The folder.
        stem: With which their names begin.
        but: Names that stay.
    """
    index = index_name(stem)
    weights = re.compile(rf"{re.escape(stem)}(-\d+-of-\d+)?\.safetensors", re.ASCII)
    there = store.list_files()
    if index in there:
        store.delete(index)
    for name in sorted(there):
        if weights.fullmatch(name) and name not in but:
            store.delete(name)
