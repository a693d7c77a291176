"""What a save has fsynced by the time it says that it is done, in whichever process.

    rank ──watch──> os.fsync notes device, inode and size ──> log <──the same── every Python process it starts

Without an fsync a file may be gone, or empty, after the machine has lost power, however long ago it was
written; with one that comes before the last write, its end may be.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

__all__ = ["forget", "judge", "note_fsyncs", "watch"]

# Runs at the start of every Python process that finds it.
AT_START = """
import sys
sys.path.insert(0, {scripts!r})
from bench_parts.peers.fsyncs import note_fsyncs
note_fsyncs({log!r})
sys.path.remove({scripts!r})
"""


def watch(folder: Path) -> Path:
    """Note what this process and those that it starts from now on fsync; return the log.

    Args:
        folder: For the log; of this rank alone.
    """
    log = folder / "fsyncs"
    scripts = str(Path(__file__).resolve().parents[2])
    (folder / "sitecustomize.py").write_text(AT_START.format(scripts=scripts, log=str(log)))
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    log.touch()
    note_fsyncs(str(log))
    return log


def note_fsyncs(log: str) -> None:
    """Make ``os.fsync`` and ``os.fdatasync`` of this process write to the log what they are called with."""
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def noting(sync: Callable[[int], None]) -> Callable[[int], None]:
        def note(target: int) -> None:
            sync(target)
            found = os.fstat(target)
            os.write(fd, f"{found.st_dev} {found.st_ino} {found.st_size}\n".encode())

        return note

    os.fsync, os.fdatasync = noting(os.fsync), noting(os.fdatasync)


def forget(log: Path) -> None:
    """Empty the log: a file that is made now may have the inode of one that was removed."""
    os.truncate(log, 0)


def judge(logs: list[Path], folder: Path) -> str:
    """Say whether a save into ``folder`` was durable when it ended.

    Returns:
        ``yes``; ``no``; or what was missing: files that nobody fsynced beside others that were, or bytes
        written to a file after its last fsync.
    """
    sizes: dict[tuple[int, int], int] = {}
    for log in logs:
        for line in log.read_text().splitlines():
            device, inode, size = map(int, line.split())
            sizes[device, inode] = max(size, sizes.get((device, inode), 0))
    files = [(path, path.stat()) for path in sorted(folder.rglob("*")) if path.is_file()]
    missing = [path for path, s in files if (s.st_dev, s.st_ino) not in sizes]
    late_bytes = sum(s.st_size - sizes.get((s.st_dev, s.st_ino), s.st_size) for _, s in files)
    if len(missing) == len(files):
        return "no"
    if missing:
        return f"no: {len(missing)} of {len(files)} files"
    return f"but {late_bytes} B" if late_bytes > 0 else "yes"
