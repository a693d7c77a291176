"""From images to committed checkpoints, behind training's back.

    writer (one file after the other)          commit thread (one save after the other)
    image ──> durable shard file ──receipt──>  all ranks' receipts ──> manifest, published by the coordinator

Invariant: saves are committed in the order in which they were made; a failure on any rank is every rank's
outcome; nothing waits without a deadline. Ranks talk through the c10d store alone: no collective of the
training's process group runs here.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

from fsdp_ckpt.commit.catalog import CheckpointInfo
from fsdp_ckpt.errors import StorageError, describe
from fsdp_ckpt.ranks.group import RankGroup
from fsdp_ckpt.writer import ProcessWriter, ShardWriter, ThreadWriter

__all__ = ["Persister"]

logger = logging.getLogger("fsdp_ckpt")


class Persister:
    """Sees saves through; its threads do not keep a program from ending, but what was begun is finished.

    Args:
        group: The ranks, with a connection for this alone.
        timeout_s: How long one rank's file may take, in seconds.
    """

    def __init__(self, group: RankGroup, timeout_s: float) -> None:
        self._group = group
        self._timeout_s = timeout_s
        self._threads = ThreadWriter()
        self._process: ProcessWriter | None = None
        self._commits = ThreadPoolExecutor(1, "fsdp_ckpt-commit")
        self._open: set[Future[CheckpointInfo]] = set()
        _persisters.add(self)

    def writer(self, *, in_process: bool) -> ShardWriter:
        """Return the writer of the kind that is asked for."""
        if not in_process:
            return self._threads
        if self._process is None:
            self._process = ProcessWriter()
        return self._process

    @property
    def writer_pid(self) -> int | None:
        """Process id of the writer process, once it has been started."""
        return self._process.pid if self._process else None

    def submit(
        self,
        step: int,
        write: Future[str],
        receipt: Callable[[str], Any],
        publish: Callable[[list[Any]], dict[str, Any]],
    ) -> Future[CheckpointInfo]:
        """See one save through; called by every rank, in the same order.

        Args:
            step: What is saved.
            write: This rank's file; resolves to the digest of its header.
            receipt: That digest → what to tell the coordinator, JSON.
            publish: All ranks' receipts → the published checkpoint; runs on the coordinator.
        """

        def persist() -> Any:
            if not wait([write], self._timeout_s).done:
                if self._process is not None:
                    self._process.kill()  # whatever it hangs in
                raise StorageError(f"writing took more than {self._timeout_s:g} s")
            return receipt(write.result())

        def commit() -> CheckpointInfo:
            try:
                found = self._group.commit(f"saving step {step}", persist, publish)
            except Exception as e:
                # Whether or not anyone asks for the outcome.
                logger.error("rank %d: %s", self._group.rank, describe(e))
                raise
            info = CheckpointInfo(**found)
            if self._group.is_coordinator:
                logger.info("saved step %d, %d bytes, to %s", step, info.num_bytes, info.url)
            return info

        future = self._commits.submit(commit)
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        return future

    def finish(self) -> None:
        """Return when nothing is under way, and all that follows a commit on its thread is done too."""
        wait(list(self._open))
        with suppress(RuntimeError):  # closed, which finishes
            self._commits.submit(int).result()

    def close(self) -> None:
        """Finish, and end the threads and the writer process."""
        self._commits.shutdown()
        self._threads.close()
        if self._process is not None:
            self._process.close()


_persisters: weakref.WeakSet[Persister] = weakref.WeakSet()


def _finish_all() -> None:
    for persister in list(_persisters):
        persister.finish()


# Finish before the interpreter takes threads away, and with them what stores use to work. Not atexit, which
# runs after executors have been shut down. concurrent.futures uses the same hook; it has no public name.
# Without it, what is queued on our own threads is still finished.
if (_register := getattr(threading, "_register_atexit", None)) is not None:
    _register(_finish_all)
# A forked data worker has the futures, but not the threads that would resolve them.
os.register_at_fork(after_in_child=_persisters.clear)
