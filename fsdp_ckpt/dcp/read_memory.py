"""The host memory that one load reads into, and what of a checkpoint it has already, or soon.

    read ahead   this rank's own file, on its way while the plan is being made
    held         a file that a save of this process has left in a buffer of the pool

Invariant: no buffer goes back to its pool while anything can still write to it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from fsdp_ckpt.commit.checkpoint import Checkpoint
from fsdp_ckpt.commit.source_images import allocate_sparsely
from fsdp_ckpt.plan.image import BLOCK_BYTES
from fsdp_ckpt.snapshot.buffer import HostBuffer, ImagePool
from fsdp_ckpt.storage.at_hand import AtHand, Held, Reading

__all__ = ["ReadMemory"]

# A smaller file is there about as soon when the plan has asked for it.
LEAST_AHEAD_BYTES = 16 * 1024 * 1024


class ReadMemory:
    """What a load reads into.

    Args:
        pool: Has buffers, touched by earlier saves and loads; memory of its own by default.
        num_threads: Reads in flight; by default as many as suit the store.
    """

    def __init__(self, pool: ImagePool | None, num_threads: int | None) -> None:
        self._pool = pool
        self._num_threads = num_threads
        self._buffers: list[HostBuffer] = []  # of the pool, in use
        self._ahead: dict[int, tuple[Reading, ThreadPoolExecutor]] = {}
        self.num_bytes_held = 0

    def allocate(self, num_bytes: int) -> memoryview:
        """Return at least ``num_bytes``, from a page on; its content is arbitrary."""
        if self._pool is None:
            return allocate_sparsely(num_bytes)
        buffer = self._pool.acquire(num_bytes)
        self._buffers.append(buffer)
        return memoryview(buffer.memory)

    @staticmethod
    def is_worth_reading_ahead(checkpoint: Checkpoint, rank: int) -> bool:
        """Whether a rank's file is so large that it is sooner there."""
        return checkpoint.manifest.files[rank].num_bytes >= LEAST_AHEAD_BYTES

    def read_ahead(self, checkpoint: Checkpoint, rank: int) -> None:
        """Begin to read a rank's file; once more is fine."""
        if rank in self._ahead:
            return
        file = checkpoint.manifest.files[rank]
        data_bytes = checkpoint.header(rank).layout.data_bytes
        threads = ThreadPoolExecutor(
            self._num_threads or checkpoint.store.concurrency, "fsdp_ckpt-ahead"
        )
        reading = Reading(
            checkpoint.store,
            file.name,
            file.data_offset,
            # Large enough for the next save's image too.
            self.allocate(file.num_bytes)[:data_bytes],
            block_bytes=BLOCK_BYTES,
            threads=threads,
        )
        self._ahead[rank] = reading, threads
        reading.want([(0, data_bytes)])

    def at_hand(self, checkpoint: Checkpoint, rank: int, *, held: bool) -> AtHand | None:
        """Return where a file's data is already, or soon.

        Args:
            checkpoint: Whose file.
            rank: Whose file.
            held: Whether what a save has left may be taken; it is gone then.
        """
        if rank in self._ahead:
            return self._ahead[rank][0]
        return self._take_held(checkpoint, rank) if held else None

    def _take_held(self, checkpoint: Checkpoint, rank: int) -> Held | None:
        file = checkpoint.manifest.files[rank]
        buffer = self._pool.take_holding(file.name) if self._pool is not None else None
        if buffer is None:
            return None
        self._buffers.append(buffer)
        self.num_bytes_held += file.num_bytes - file.data_offset
        return Held(memoryview(buffer.memory)[file.data_offset : file.num_bytes])

    def release(self) -> None:
        """Give everything back; nothing may look at it any more."""
        while self._ahead:
            _, (_, threads) = self._ahead.popitem()
            threads.shutdown(cancel_futures=True)  # and wait for what has begun
        while self._pool is not None and self._buffers:
            self._pool.release(self._buffers.pop())
