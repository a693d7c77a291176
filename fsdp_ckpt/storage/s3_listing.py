"""One level of a bucket's names, page by page.

Invariant: asked for each time and never from a cache; complete, or an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdp_ckpt.errors import StorageError

__all__ = ["list_level"]


def list_level(
    next_page: Callable[[dict[str, str]], dict[str, Any]], prefix: str
) -> tuple[set[str], dict[str, int]]:
    """Return the names of the folders and name → bytes of the objects directly below a prefix.

    Args:
        next_page: Where to go on → answer to ``list_objects_v2`` with the delimiter ``/``.
        prefix: Empty, or ends with a slash.

    Raises:
        StorageError: The server's pages do not end.
    """
    folders: set[str] = set()
    files: dict[str, int] = {}
    seen: set[str] = set()
    position: dict[str, str] = {}
    while True:
        page = next_page(position)
        folders |= {str(f["Prefix"])[len(prefix) : -1] for f in page.get("CommonPrefixes") or ()}
        for found in page.get("Contents") or ():
            # A folder's marker, which some tools make, has the folder's own name.
            if found["Key"] != prefix:
                files[str(found["Key"])[len(prefix) :]] = int(found["Size"])
        if not page.get("IsTruncated"):
            return folders, files
        token = str(page["NextContinuationToken"])
        # rclone goes round in circles where a level of more than a page holds folders and objects.
        if token in seen:
            raise StorageError(f"{prefix}: the server repeats a page of its listing without end")
        seen.add(token)
        position = {"ContinuationToken": token}
