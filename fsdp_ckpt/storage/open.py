"""From what a user writes to a store."""

from __future__ import annotations

import os
import re
from typing import Any

from fsspec.core import split_protocol

from fsdp_ckpt.errors import StorageError
from fsdp_ckpt.storage.fsspec_store import FsspecStore, without_credentials
from fsdp_ckpt.storage.local import LocalStore
from fsdp_ckpt.storage.store import Store

__all__ = ["open_store"]

_BROKEN_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")


def open_store(url: str | os.PathLike[str] | Store, **storage_options: Any) -> Store:
    """Open the store rooted at ``url``; nothing is created or contacted.

    Args:
        url: A path, ``file://``, or any URL that fsspec knows (``s3://bucket/run``, ``memory://run``).
            A ``PathLike`` is a local path: ``pathlib`` breaks URLs (``s3://b`` becomes ``s3:/b``). A store is
            returned as it is.
        **storage_options: Passed to the fsspec filesystem (credentials, endpoint); not to local files.

    Raises:
        StorageError: No such protocol, or a URL that went through ``pathlib``.
    """
    if isinstance(url, Store):
        return url
    text = os.fspath(url)
    if not isinstance(text, str) or not text:
        raise StorageError(f"{url!r} is not a path or URL")
    if _BROKEN_URL.match(text):
        raise StorageError(f"{text!r} is a URL that went through pathlib; pass it as a str")
    if not isinstance(url, str):
        return LocalStore(text)
    protocol, path = split_protocol(text)
    if protocol in (None, "file", "local"):
        return LocalStore(path)
    if protocol in ("s3", "s3a"):
        return _open_s3(text, storage_options)
    return FsspecStore(text, storage_options)


def _open_s3(url: str, storage_options: dict[str, Any]) -> Store:
    try:
        # Not at the top: s3fs is an extra, and takes half a second to load.
        from fsdp_ckpt.storage.s3 import S3Store
    except ImportError as e:
        shown = without_credentials(url)
        raise StorageError(f"{shown}: {e}; pip install 'fsdp-ckpt[s3]'", key=shown) from e
    return S3Store(url, storage_options)
