"""Any store that fsspec knows.

Listings never come from a cache: another process's commit must be seen at once. A process uses only a
filesystem that it made itself: fsspec's thread does not survive a fork.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import fsspec
from fsspec.spec import AbstractBufferedFile

from fsdp_ckpt.errors import (
    AlreadyCommittedError,
    CheckpointError,
    NotFoundError,
    StorageError,
    describe,
)
from fsdp_ckpt.storage.retry import is_transient
from fsdp_ckpt.storage.store import refuse_larger

__all__ = ["FsspecStore", "without_credentials"]

# What was made before a fork: to close its connections here would disturb the parent's.
_inherited: list[Any] = []


class FsspecStore:
    """Objects below a URL.

    Args:
        url: Any URL that fsspec knows.
        storage_options: Passed to the filesystem.
    """

    concurrency = 4
    read_bytes = 16 * 1024 * 1024
    gap_bytes = 1024 * 1024

    def __init__(self, url: str, storage_options: dict[str, Any] | None = None) -> None:
        self._url = url if url.endswith("://") else url.rstrip("/")
        # Messages and reports show it.
        self.url = without_credentials(self._url)
        self._options = dict(storage_options or {})
        self._open()

    def _open(self) -> None:
        try:
            self._opened, self._root = fsspec.core.url_to_fs(self._url, **self._options)
        except (ValueError, ImportError) as e:
            raise StorageError(f"{self.url}: {without_credentials(str(e))}", key=self.url) from e
        self._pid = os.getpid()

    @property
    def _fs(self) -> Any:
        # No lock: after a fork, another thread of the parent might hold it for ever.
        if self._pid != os.getpid():
            _inherited.append(self._opened)
            self._open()
        return self._opened

    def child(self, key: str) -> FsspecStore:
        """Return the store rooted at ``key``."""
        return FsspecStore(f"{self._url}/{key}", self._options)

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def write(self, key: str, num_bytes: int) -> FsspecWriter:
        """Start a new object."""
        path = self._path(key)
        with self._mapped(key):
            self._fs.makedirs(self._fs._parent(path), exist_ok=True)
            self._refuse_existing(key)
            return FsspecWriter(self, key, self._fs.open(path, "wb"))

    def create(self, key: str, data: bytes) -> None:
        """Write a small object; conditionally where the filesystem can, after a look where it cannot."""
        path = self._path(key)
        with self._mapped(key):
            self._fs.makedirs(self._fs._parent(path), exist_ok=True)
            self._refuse_existing(key)
            self._fs.pipe_file(path, data, mode="create")

    def _refuse_existing(self, key: str) -> None:
        # Not fs.exists(), which takes every error for absence.
        with suppress(NotFoundError):
            self.size(key)
            raise AlreadyCommittedError(f"{self.url}/{key}: exists already", key=key)

    def read(self, key: str, max_bytes: int | None = None) -> bytes:
        """Return the whole object."""
        if max_bytes is not None:
            refuse_larger(self.size(key), max_bytes, self.url, key)
        with self._mapped(key):
            return bytes(self._fs.cat_file(self._path(key)))

    def read_into(self, key: str, byte_offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` by one ranged read."""
        if not buffer:
            return
        with self._mapped(key):
            data = self._fs.cat_file(
                self._path(key), start=byte_offset, end=byte_offset + len(buffer)
            )
        if len(data) != len(buffer):
            raise StorageError(
                f"{self.url}/{key}: {len(data)} of {len(buffer)} bytes at byte {byte_offset}",
                key=key,
            )
        buffer[:] = data

    def size(self, key: str) -> int:
        """Return the object's size in bytes."""
        with self._mapped(key):
            self._fs.invalidate_cache(self._fs._parent(self._path(key)))
            return int(self._fs.size(self._path(key)))

    def list_folders(self) -> list[str]:
        """Return the names of the folders, sorted."""
        return sorted(name for name, info in self._list() if info["type"] == "directory")

    def list_files(self) -> dict[str, int]:
        """Return name → bytes of the objects."""
        return {name: int(info["size"]) for name, info in self._list() if info["type"] == "file"}

    def _list(self) -> list[tuple[str, dict[str, Any]]]:
        try:
            with self._mapped(""):
                self._fs.invalidate_cache(self._root)
                found = self._fs.ls(self._root, detail=True)
        except NotFoundError:
            return []
        if any(info["name"] == self._root for info in found):
            raise StorageError(f"{self.url}: an object, not a folder", key=self.url)
        listed = [(str(info["name"]).rstrip("/"), info) for info in found]
        # Object stores list a folder's marker, which ends with a slash, in the folder itself.
        return [(name.rpartition("/")[2], info) for name, info in listed if name != self._root]

    def delete(self, key: str) -> None:
        """Remove one object."""
        with suppress(NotFoundError), self._mapped(key):
            self._fs.rm_file(self._path(key))

    @contextmanager
    def _mapped(self, key: str) -> Iterator[None]:
        """Map the filesystem's errors to our tree."""
        where = f"{self.url}/{key}" if key else self.url
        try:
            yield
        except CheckpointError:
            raise
        except FileNotFoundError as e:
            raise NotFoundError(f"{where}: not found", key=key) from e
        except FileExistsError as e:
            raise AlreadyCommittedError(f"{where}: exists already", key=key) from e
        except Exception as e:  # filesystems let errors of their own client libraries through
            text = without_credentials(describe(e))
            raise StorageError(f"{where}: {text}", retryable=is_transient(e), key=key) from e


def without_credentials(text: str) -> str:
    """Return ``text`` with the user names and passwords in its URLs left out."""
    # A secret may hold slashes.
    return re.sub(r"://(?:[^/@\s]*|[^/@\s:]*:[^@\s]*)@", "://", text)


class FsspecWriter:
    """One new object, written in order."""

    ordered = True
    part_bytes = 0

    def __init__(self, store: FsspecStore, key: str, file: Any) -> None:
        self._store = store
        self._key = key
        self._file = file
        self._position = 0

    def write_at(self, byte_offset: int, data: memoryview) -> None:
        """Write the next bytes."""
        if byte_offset != self._position:
            raise StorageError(f"{self._key}: bytes out of order at {byte_offset}", key=self._key)
        with self._store._mapped(self._key):
            self._file.write(data)
        self._position += len(data)

    def flush(self) -> None:
        """Do nothing: the object appears whole, at the end."""

    def commit(self) -> None:
        """Close the object, which publishes it."""
        with self._store._mapped(self._key):
            self._file.close()

    def abort(self) -> None:
        """Drop the object."""
        with self._store._mapped(self._key):
            if isinstance(self._file, AbstractBufferedFile):
                # Closing it would publish it, and so would its finaliser.
                self._file.discard()
                self._file.closed = True
            else:
                self._file.close()
        self._store.delete(self._key)
