"""Local and mounted file systems.

Durable means: the file is fsynced, then its directory, and every directory that had to be made.
"""

from __future__ import annotations

import errno
import fcntl
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fsdp_ckpt.errors import AlreadyCommittedError, NotFoundError, StorageError

__all__ = ["LocalStore"]


class LocalStore:
    """Objects are files below a root directory.

    Args:
        root: Path of the directory; made when the first object is written.
    """

    concurrency = 2  # saturates a disk or a core, whichever is slower

    def __init__(self, root: str) -> None:
        self.url = os.path.abspath(os.path.expanduser(root))

    def child(self, key: str) -> LocalStore:
        """Return the store rooted at ``key``."""
        return LocalStore(self._path(key))

    def _path(self, key: str) -> str:
        return os.path.join(self.url, *key.split("/"))

    def write(self, key: str, num_bytes: int) -> LocalWriter:
        """Start a new file, under its final name: no one reads its folder before it is whole."""
        path = self._path(key)
        with mapped_os_errors(path):
            _make_dirs(os.path.dirname(path))
            return LocalWriter(path, num_bytes)

    def create(self, key: str, data: bytes) -> None:
        """Write a whole file under a temporary name, then link it: ``link`` fails where the name exists."""
        path = self._path(key)
        temporary = f"{path}.{uuid.uuid4().hex}.tmp"
        with mapped_os_errors(path):
            _make_dirs(os.path.dirname(path))
            try:
                _write_durably(temporary, data)
                _link(temporary, path)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(temporary)
            _fsync_dir(os.path.dirname(path))

    def read(self, key: str) -> bytes:
        """Return the whole file."""
        path = self._path(key)
        with mapped_os_errors(path), open(path, "rb") as file:
            return file.read()

    def read_into(self, key: str, byte_offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` by positioned reads."""
        path = self._path(key)
        with mapped_os_errors(path):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                done = 0
                while done < len(buffer):
                    count = os.preadv(fd, [buffer[done:]], byte_offset + done)
                    if count == 0:
                        raise StorageError(
                            f"{path}: ends at byte {byte_offset + done}, {len(buffer) - done} more expected",
                            key=path,
                        )
                    done += count
            finally:
                os.close(fd)

    def size(self, key: str) -> int:
        """Return the file's size in bytes."""
        path = self._path(key)
        with mapped_os_errors(path):
            return os.stat(path).st_size

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
            with mapped_os_errors(self.url), os.scandir(self.url) as entries:
                return list(entries)
        except NotFoundError:
            return []

    def delete(self, key: str) -> None:
        """Remove a file, and its directory where that is then empty."""
        path = self._path(key)
        with mapped_os_errors(path):
            with suppress(FileNotFoundError):
                os.unlink(path)
            with suppress(OSError):  # not empty, or already gone
                os.rmdir(os.path.dirname(path))


class LocalWriter:
    """One new file, preallocated, written at any offset from any thread."""

    ordered = False
    part_bytes = 0

    def __init__(self, path: str, num_bytes: int) -> None:
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            # Reserve the space first: a full disk shows before the first byte, and writing is faster.
            os.posix_fallocate(self._fd, 0, num_bytes)
        except OSError as e:
            if e.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                self.abort()
                raise

    def write_at(self, byte_offset: int, data: memoryview) -> None:
        """Write all of ``data``."""
        with mapped_os_errors(self._path):
            done = 0
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], byte_offset + done)

    def flush(self) -> None:
        """Fsync the file."""
        with mapped_os_errors(self._path):
            os.fsync(self._fd)

    def commit(self) -> None:
        """Fsync the file and its directory."""
        with mapped_os_errors(self._path):
            try:
                os.fsync(self._fd)
            finally:
                self._close()
            _fsync_dir(os.path.dirname(self._path))

    def abort(self) -> None:
        """Remove the file."""
        self._close()
        with suppress(FileNotFoundError):
            os.unlink(self._path)

    def _close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


@contextmanager
def mapped_os_errors(path: str) -> Iterator[None]:
    """Map ``OSError`` to our tree, naming the path."""
    try:
        yield
    except (StorageError, NotFoundError, AlreadyCommittedError):
        raise
    except FileNotFoundError as e:
        raise NotFoundError(f"{path}: no such file", key=path) from e
    except FileExistsError as e:
        raise AlreadyCommittedError(f"{path}: exists already", key=path) from e
    except OSError as e:
        retryable = e.errno in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT, errno.EIO, errno.ESTALE)
        raise StorageError(f"{path}: {e.strerror or e}", retryable=retryable, key=path) from e


def _link(temporary: str, path: str) -> None:
    """Give ``temporary`` its final name unless that exists."""
    try:
        os.link(temporary, path)
    except OSError as e:
        # Some mounts (FUSE, vfat, CIFS) have no hard links.
        if e.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES):
            raise
        _rename_exclusively(temporary, path)


def _rename_exclusively(temporary: str, path: str) -> None:
    """Give ``temporary`` its final name, under a lock that rivals take too."""
    claim = f"{path}.claim"
    fd = os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        # The lock dies with its holder, so a crash between here and the rename blocks no one. flock, since
        # lockf would not keep two threads of one process apart.
        fcntl.flock(fd, fcntl.LOCK_EX)
        is_mine = not os.path.exists(path)
        if is_mine:
            os.rename(temporary, path)
        # Only now: whoever takes the lock of a new claim file finds the name taken.
        with suppress(FileNotFoundError):
            os.unlink(claim)
    finally:
        os.close(fd)
    if not is_mine:
        raise FileExistsError(errno.EEXIST, "exists already", path)


def _write_durably(path: str, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def _make_dirs(path: str) -> None:
    """Make ``path`` and its parents; fsync the parent of each one made."""
    missing = []
    while path and not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for directory in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(directory)
        _fsync_dir(os.path.dirname(directory))


def _fsync_dir(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as e:
        # Some network mounts refuse to sync a directory; they are durable at close or not at all.
        if e.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(fd)
