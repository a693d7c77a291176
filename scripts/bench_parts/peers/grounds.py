"""Where peers save: folders of a disk, or a bucket of a server on loopback.

Invariant: what a ground does for one method ends before the next one starts, outside of what is timed.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from bench_parts.limits import drop_cached
from bench_parts.peers.fsyncs import forget, judge, watch

__all__ = ["Bucket", "Disk", "Ground"]


class Ground(Protocol):
    """Places for peers; every method is called by every rank."""

    def place(self, name: str) -> str:
        """Return a peer's own place."""

    def prepare(self, name: str) -> None:
        """Have an empty place, and a quiet disk."""

    def judge(self, name: str) -> str:
        """Say, on rank 0, whether what the peer has just saved is durable."""

    def settle(self, name: str) -> None:
        """Make it durable."""

    def forget(self, name: str) -> None:
        """Have a load read it anew."""


class Disk:
    """A folder per peer.

    Args:
        root: Of all of them.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        notes = root / f"notes-{dist.get_rank()}"
        notes.mkdir()
        self._log = watch(notes)

    def place(self, name: str) -> str:
        """Return its folder."""
        return str(self._folder(name))

    def prepare(self, name: str) -> None:
        """Remove what other methods have written, and wait until the file system has freed it."""
        dist.barrier()
        if dist.get_rank() == 0:
            for folder in self._root.glob("of-*"):
                shutil.rmtree(folder)
            self._folder(name).mkdir()
            os.sync()
        forget(self._log)
        dist.barrier()

    def judge(self, name: str) -> str:
        """Compare the files with what was fsynced."""
        dist.barrier()  # all ranks were told that it is saved
        logs = sorted(self._root.glob("notes-*/fsyncs"))
        return judge(logs, self._folder(name)) if dist.get_rank() == 0 else ""

    def settle(self, name: str) -> None:
        """Fsync every file, a share of them per rank, and the folders."""
        dist.barrier()
        found = sorted([self._folder(name), *self._folder(name).rglob("*")])
        for path in found[dist.get_rank() :: dist.get_world_size()]:
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)

    def forget(self, name: str) -> None:
        """Take it out of the page cache."""
        dist.barrier()
        if dist.get_rank() == 0:
            drop_cached(self._folder(name))
        dist.barrier()

    def _folder(self, name: str) -> Path:
        return self._root / f"of-{name.replace(' ', '-')}"


class Bucket:
    """A prefix per peer; what it saves again replaces what it saved before.

    Args:
        url: Of a folder in the bucket.
        options: What s3fs needs to reach it.
    """

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self.url, self.options = url, options

    def place(self, name: str) -> str:
        """Return its URL."""
        return f"{self.url}/{name.replace(' ', '-')}"

    def prepare(self, name: str) -> None:
        """Have nothing written back beside this method: the server's files are on this machine."""
        dist.barrier()
        if dist.get_rank() == 0:
            os.sync()
        dist.barrier()

    def judge(self, name: str) -> str:
        """An object that the store has acknowledged is as durable as the store."""
        return "yes"

    def settle(self, name: str) -> None:
        """Nothing to do."""

    def forget(self, name: str) -> None:
        """Nothing to do: nobody keeps objects in memory but the server."""
