"""Persists images in this process, on one thread at a time."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from fsdp_ckpt.storage.store import Store
from fsdp_ckpt.writer.handover import FileName, Handover
from fsdp_ckpt.writer.job import WriteJob, run_job

__all__ = ["ThreadWriter"]


class _PendingWrite:
    def __init__(self, handover: Handover, future: Future[str]) -> None:
        self.future = future
        self.name = handover.name
        self.filled = handover.filled
        self.fail = handover.fail


class ThreadWriter:
    """Writes files one after the other, each with several threads. Its threads end with the program."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, "fsdp_ckpt-writer")

    def submit(
        self,
        job: WriteJob,
        image: memoryview,
        fd: int,
        store: Store,
        name: FileName | None = None,
    ) -> _PendingWrite:
        """Start writing; see :class:`~fsdp_ckpt.writer.job.ShardWriter`."""
        handover = Handover(name)
        future = self._threads.submit(run_job, job, image, store, handover)
        return _PendingWrite(handover, future)

    def close(self) -> None:
        """Finish what was submitted."""
        self._threads.shutdown()
