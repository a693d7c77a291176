"""Local and mounted file systems.

Durable means: the file is fsynced, then its directory, and every directory that had to be made.
Inside means: no key, and no symbolic link below the root, leads out of the root.
"""

from __future__ import annotations

import os
import stat
import uuid
from contextlib import suppress

from fsdp_ckpt.errors import (
    CorruptCheckpointError,
    NotFoundError,
    StorageError,
)
from fsdp_ckpt.storage.direct import DirectFile
from fsdp_ckpt.storage.durable import fsync_dir, link_exclusively, make_dirs, write_durably
from fsdp_ckpt.storage.local_writer import (
    LocalWriter,
    UnnamedLocalWriter,
    goes_direct,
    mapped_os_errors,
)
from fsdp_ckpt.storage.store import refuse_larger

__all__ = ["LocalStore"]


class LocalStore:
    """Objects are files below a root directory.

    Args:
        root: Path of the directory, through symbolic links or not; made when the first object is written.
        direct: Whether large files bypass the page cache; by default where the file system can, and reads
            only what is not cached already.
    """

    concurrency = 2  # saturates a disk or a core, whichever is slower
    read_bytes = 16 * 1024 * 1024
    gap_bytes = 128 * 1024

    def __init__(self, root: str, *, direct: bool | None = None) -> None:
        self.url = os.path.abspath(os.path.expanduser(root))
        self._direct = direct
        self._top = self.url

    def child(self, key: str) -> LocalStore:
        """Return the store rooted at ``key``; it ends where this one ends."""
        child = LocalStore(self._path(key), direct=self._direct)
        child._top = self._top
        return child

    def _path(self, key: str) -> str:
        parts = key.split("/")
        # Keys come from manifests, so one that leads out is damage: an older checkpoint may be whole.
        if not {"", ".", ".."}.isdisjoint(parts) or "\0" in key:
            raise CorruptCheckpointError(f"{self.url}: {key!r} is no key of an object", key=key)
        return os.path.join(self.url, *parts)

    def _inside(self, path: str) -> str:
        """Return ``path``; refuse one that symbolic links lead out of the root."""
        top, real = os.path.realpath(self._top), os.path.realpath(path)
        if os.path.commonpath((top, real)) != top:
            raise CorruptCheckpointError(
                f"{path} leads to {real}, out of {self._top}; open that folder itself", key=path
            )
        return path

    def _new_path(self, key: str) -> str:
        """Return the path of a new file, whose folder exists."""
        path = self._path(key)
        make_dirs(self._inside(os.path.dirname(path)))
        return path

    def write(self, key: str, num_bytes: int) -> LocalWriter:
        """Start a new file, under its final name: no one reads its folder before it is whole."""
        with mapped_os_errors(self._path(key)):
            return LocalWriter(self._new_path(key), num_bytes, direct=self._direct)

    def write_unnamed(self, num_bytes: int) -> UnnamedLocalWriter | None:
        """Start a new file that has no name yet: it is gone with the process that writes it."""
        if UnnamedLocalWriter.is_refused(self.url):
            return None
        try:
            return UnnamedLocalWriter(self.url, num_bytes, self._new_path, direct=self._direct)
        except OSError:
            # The root is not there yet, or its file system has no such files. Anything else will be met, and
            # told, under the file's name.
            return None

    def create(self, key: str, data: bytes) -> None:
        """Write a whole file under a temporary name, then link it: ``link`` fails where the name exists."""
        with mapped_os_errors(self._path(key)):
            path = self._new_path(key)
            temporary = f"{path}.{uuid.uuid4().hex}.tmp"
            try:
                write_durably(temporary, data)
                link_exclusively(temporary, path)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(temporary)
            fsync_dir(os.path.dirname(path))

    def read(self, key: str, max_bytes: int | None = None) -> bytes:
        """Return the whole file."""
        with mapped_os_errors(self._path(key)), os.fdopen(self._open(key), "rb") as file:
            refuse_larger(os.fstat(file.fileno()).st_size, max_bytes, self.url, key)
            return file.read()

    def read_into(self, key: str, byte_offset: int, buffer: memoryview) -> None:
        """Fill ``buffer``, from the page cache where the bytes are there, else directly."""
        path = self._path(key)
        with mapped_os_errors(path):
            fd = self._open(key)
            file = DirectFile(fd)
            try:
                if goes_direct(self._direct, len(buffer)):
                    file.try_direct(path, os.O_RDONLY, probes_cache=self._direct is None)
                done = file.read_into(byte_offset, buffer)
            finally:
                file.close()
        if done < len(buffer):
            raise StorageError(
                f"{path}: ends at byte {byte_offset + done}, {len(buffer) - done} more expected",
                key=path,
            )

    def _open(self, key: str) -> int:
        """Open a file to read."""
        path = self._inside(self._path(key))
        # O_NONBLOCK: a named pipe would wait for someone to write.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise StorageError(f"{path}: not a file", key=path)
        return fd

    def size(self, key: str) -> int:
        """Return the file's size in bytes."""
        path = self._path(key)
        with mapped_os_errors(path):
            return os.stat(self._inside(path)).st_size

    def list_folders(self) -> list[str]:
        """Return the names of the subdirectories, sorted."""
        return sorted(entry.name for entry in self._scan() if entry.is_dir())

    def list_files(self) -> dict[str, int]:
        """Return name → bytes of the files."""
        sizes: dict[str, int] = {}
        for entry in self._scan():
            # What vanishes meanwhile, such as a rival's temporary file, is not there.
            with suppress(NotFoundError), mapped_os_errors(entry.path):
                if entry.is_file():
                    sizes[entry.name] = entry.stat().st_size
        return sizes

    def _scan(self) -> list[os.DirEntry[str]]:
        try:
            with mapped_os_errors(self.url), os.scandir(self._inside(self.url)) as entries:
                return list(entries)
        except NotFoundError:
            return []

    def delete(self, key: str) -> None:
        """Remove a file, and its directory where that is then empty."""
        path = self._path(key)
        with mapped_os_errors(path):
            self._inside(os.path.dirname(path))
            with suppress(FileNotFoundError):
                os.unlink(path)
            with suppress(OSError):  # not empty, or already gone
                os.rmdir(os.path.dirname(path))
