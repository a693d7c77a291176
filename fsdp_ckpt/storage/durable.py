"""Files and directories that are there after a power cut, and names that only one of many can take.

The functions raise ``OSError``: who calls them knows the key.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress

__all__ = ["fsync_dir", "link_exclusively", "make_dirs", "write_durably"]


def link_exclusively(temporary: str, path: str) -> None:
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


def write_durably(path: str, data: bytes) -> None:
    """Write a new file; what makes its name durable is its directory's fsync."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def make_dirs(path: str) -> None:
    """Make ``path`` and its parents; fsync the parent of each one made."""
    missing = []
    while path and not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for directory in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(directory)
        fsync_dir(os.path.dirname(directory))


def fsync_dir(path: str) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as e:
        # Some network mounts refuse to sync a directory; they are durable at close or not at all.
        if e.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(fd)
