"""The names in a bucket, page by page: one level, or everything in some folders.

Invariant: asked for each time and never from a cache; complete, or an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from fsdp_ckpt.errors import StorageError

__all__ = ["list_level", "list_trees"]

NextPage = Callable[[dict[str, str]], dict[str, Any]]  # where to go on -> answer to list_objects_v2


def list_level(next_page: NextPage, prefix: str) -> tuple[set[str], dict[str, int]]:
    """Return the names of the folders and name → bytes of the objects directly below a prefix.

    Args:
        next_page: Where to go on → answer to ``list_objects_v2`` with the delimiter ``/``.
        prefix: Empty, or ends with a slash.

    Raises:
        StorageError: The server's pages do not end.
    """
    folders: set[str] = set()
    files: dict[str, int] = {}
    for page in _pages(next_page, prefix, {}):
        folders |= {str(f["Prefix"])[len(prefix) : -1] for f in page.get("CommonPrefixes") or ()}
        for found in page.get("Contents") or ():
            # A folder's marker, which some tools make, has the folder's own name.
            if found["Key"] != prefix:
                files[str(found["Key"])[len(prefix) :]] = int(found["Size"])
    return folders, files


def list_trees(
    next_page: NextPage, prefix: str, folders: Collection[str]
) -> dict[str, dict[str, int]]:
    """Return folder → key relative to it → bytes, of all objects in some folders directly below a prefix.

    Takes one request per page of what lies, in the order of names, from the first of the folders to the last.

    Args:
        next_page: Where to go on → answer to ``list_objects_v2`` without a delimiter.
        prefix: Empty, or ends with a slash.
        folders: Their names; not empty.

    Raises:
        StorageError: The server's pages do not end.
    """
    trees: dict[str, dict[str, int]] = {name: {} for name in folders}
    last = f"{max(folders)}/"
    for page in _pages(next_page, prefix, {"StartAfter": f"{prefix}{min(folders)}/"}):
        key = ""
        for found in page.get("Contents") or ():
            key = str(found["Key"])[len(prefix) :]
            folder, _, name = key.partition("/")
            if folder in trees and name:
                trees[folder][name] = int(found["Size"])
        if key > last and not key.startswith(last):
            break
    return trees


def _pages(next_page: NextPage, prefix: str, position: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the pages of a listing from ``position`` on."""
    seen: set[str] = set()
    while True:
        page = next_page(position)
        yield page
        if not page.get("IsTruncated"):
            return
        token = str(page["NextContinuationToken"])
        # rclone goes round in circles where a level of more than a page holds folders and objects.
        if token in seen:
            raise StorageError(f"{prefix}: the server repeats a page of its listing without end")
        seen.add(token)
        position = {"ContinuationToken": token}
