"""New files of local file systems: under their name at once, or named while they are being written.

Durable means: the file is fsynced, then its directory.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from fsdp_ckpt.errors import (
    AlreadyCommittedError,
    CheckpointError,
    NotFoundError,
    StorageError,
)
from fsdp_ckpt.storage.direct import DirectFile
from fsdp_ckpt.storage.durable import fsync_dir
from fsdp_ckpt.storage.store import NameRefusedError

__all__ = ["DIRECT_BYTES", "LocalWriter", "UnnamedLocalWriter", "goes_direct", "mapped_os_errors"]

# Files and reads below this go through the page cache: opening the file twice would cost more.
DIRECT_BYTES = 1024 * 1024
# Folders where a file that had no name could not get one: it is tried once, not with every file.
_nameless: set[str] = set()


class LocalWriter:
    """One new file, preallocated, written at any offset from any thread.

    Args:
        path: Of the file.
        num_bytes: Its size.
        direct: As in :class:`LocalStore`.
    """

    ordered = False
    part_bytes = 0

    def __init__(self, path: str, num_bytes: int, *, direct: bool | None = None) -> None:
        self._path = path
        self._fd = self._open()
        self._file = DirectFile(self._fd)
        try:
            _preallocate(self._fd, num_bytes)
            if goes_direct(direct, num_bytes):
                self._file.try_direct(self._reopened, os.O_WRONLY)
        except BaseException:
            self.abort()
            raise

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    @property
    def _reopened(self) -> str:
        """The path by which the file can be opened once more."""
        return self._path

    def write_at(self, byte_offset: int, data: memoryview) -> None:
        """Write all of ``data``."""
        with mapped_os_errors(self._path):
            self._file.write_at(byte_offset, data)

    def flush(self) -> None:
        """Fsync the file."""
        with mapped_os_errors(self._path):
            self._file.sync()

    def commit(self) -> None:
        """Fsync the file and its directory."""
        with mapped_os_errors(self._path):
            try:
                self._file.sync()
            finally:
                self._file.close()
            fsync_dir(os.path.dirname(self._path))

    def abort(self) -> None:
        """Remove the file."""
        with mapped_os_errors(self._path):
            try:
                self._file.close()
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(self._path)


class UnnamedLocalWriter(LocalWriter):
    """One new file that gets its name while it is being written.

    Args:
        folder: On the file system where the file belongs.
        num_bytes: Its size.
        new_path: Key → path of a new file, whose folder exists.
        direct: As in :class:`LocalStore`.
    """

    @staticmethod
    def is_refused(folder: str) -> bool:
        """Whether such a file has not got its name, of those that began in this folder."""
        return folder in _nameless

    def __init__(
        self,
        folder: str,
        num_bytes: int,
        new_path: Callable[[str], str],
        *,
        direct: bool | None = None,
    ) -> None:
        self._folder = folder
        self._new_path = new_path
        self._is_named = False
        super().__init__(folder, num_bytes, direct=direct)

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, 0o666)

    @property
    def _reopened(self) -> str:
        return f"/proc/self/fd/{self._fd}"

    def name(self, key: str) -> None:
        """Link the file to its path."""
        with mapped_os_errors(os.path.join(self._folder, key)):
            path = self._new_path(key)
            try:
                # Given a folder's descriptor Python calls linkat, which alone follows that symbolic link.
                os.link(self._reopened, path, src_dir_fd=self._fd, follow_symlinks=True)
            except FileExistsError:
                raise
            except OSError as e:
                _nameless.add(self._folder)
                raise NameRefusedError(f"{path}: {e.strerror or e}", key=path) from e
        self._path, self._is_named = path, True

    def abort(self) -> None:
        """Let go of the file; remove it where it has a name."""
        if self._is_named:
            super().abort()
        else:
            self._file.close()


def goes_direct(direct: bool | None, num_bytes: int) -> bool:
    """Decide for a file or a read of ``num_bytes``."""
    return num_bytes >= DIRECT_BYTES if direct is None else direct


def _preallocate(fd: int, num_bytes: int) -> None:
    """Reserve the space: a full disk shows before the first byte, and writing is faster."""
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as e:
        if e.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


@contextmanager
def mapped_os_errors(path: str) -> Iterator[None]:
    """Map ``OSError`` to our tree, naming the path."""
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError as e:
        raise NotFoundError(f"{path}: no such file", key=path) from e
    except FileExistsError as e:
        raise AlreadyCommittedError(f"{path}: exists already", key=path) from e
    except OSError as e:
        retryable = e.errno in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT, errno.EIO, errno.ESTALE)
        raise StorageError(f"{path}: {e.strerror or e}", retryable=retryable, key=path) from e
