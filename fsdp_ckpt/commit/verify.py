"""Proof that a checkpoint on storage is what was written: every byte of every file, read once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial

from fsdp_ckpt.commit.checkpoint import Checkpoint
from fsdp_ckpt.commit.holdings import list_names, names_between
from fsdp_ckpt.commit.source_images import allocate_sparsely
from fsdp_ckpt.errors import CorruptCheckpointError, NotFoundError
from fsdp_ckpt.plan.box import Box
from fsdp_ckpt.plan.image import BLOCK_BYTES
from fsdp_ckpt.storage.shard_io import digest

__all__ = ["find_damage"]

READ_BYTES = 16 * 1024 * 1024  # whole blocks
# While one thread digests what it has read, another one's read takes its place.
THREADS_PER_READ = 2
MAX_LACKING = 100


def find_damage(
    checkpoint: Checkpoint,
    num_threads: int | None = None,
    *,
    reads_data: bool = True,
    on_progress: Callable[[int, int], None] | None = None,
) -> Iterator[CorruptCheckpointError]:
    """Yield everything that is wrong with an open checkpoint, file by file; nothing if it is whole.

    Checked are sizes, headers, the digest of every block, and that every chunk of every tensor is in the file
    that the manifest names. That the chunks cover the tensors was proven when the manifest was opened. Holds
    at most 16 MiB per thread.

    Args:
        checkpoint: Open.
        num_threads: Reads in flight; by default as many as suit the store.
        reads_data: Whether the blocks are read too, which is all but a fraction of the bytes.
        on_progress: Called between reads with the bytes of data read so far, and those of all files.

    Raises:
        StorageError: The store cannot be read now.
    """
    ranks = range(checkpoint.manifest.world_size)
    readable: list[int] = []
    with ThreadPoolExecutor(
        num_threads or THREADS_PER_READ * checkpoint.store.concurrency, "fsdp_ckpt-verify"
    ) as threads:
        for rank, error in zip(
            ranks, threads.map(partial(_try_header, checkpoint), ranks), strict=True
        ):
            if error is None:
                readable.append(rank)
            else:
                yield error
        if reads_data:
            yield from _check_blocks(checkpoint, readable, threads, on_progress)
    if len(readable) == len(ranks):
        yield from _lacking_chunks(checkpoint)


def _try_header(checkpoint: Checkpoint, rank: int) -> CorruptCheckpointError | None:
    try:
        _check_size(checkpoint, rank)
        checkpoint.header(rank)
    except CorruptCheckpointError as e:
        return e
    return None


def _check_blocks(
    checkpoint: Checkpoint,
    ranks: Sequence[int],
    threads: Executor,
    on_progress: Callable[[int, int], None] | None,
) -> Iterator[CorruptCheckpointError]:
    spans = [
        (rank, start, min(start + READ_BYTES, checkpoint.header(rank).layout.data_bytes))
        for rank in ranks
        for start in range(0, checkpoint.header(rank).layout.data_bytes, READ_BYTES)
    ]
    total, done = sum(stop - start for _, start, stop in spans), 0
    # One buffer per thread, used again: fresh memory costs as much as the digests.
    own = threading.local()

    def check(span: tuple[int, int, int]) -> list[CorruptCheckpointError]:
        if not hasattr(own, "buffer"):
            own.buffer = allocate_sparsely(READ_BYTES)
        return _damaged_blocks(checkpoint, *span, own.buffer)

    for (_, start, stop), found in zip(spans, threads.map(check, spans), strict=True):
        if on_progress is not None:
            on_progress(done, total)
        done += stop - start
        yield from found
    if on_progress is not None:
        on_progress(done, total)


def _check_size(checkpoint: Checkpoint, rank: int) -> None:
    file = checkpoint.manifest.files[rank]
    try:
        found = checkpoint.store.size(file.name)
    except NotFoundError as e:
        raise checkpoint.damaged(rank, "it is missing") from e
    if found != file.num_bytes:
        raise checkpoint.damaged(rank, f"it has {found} bytes, {file.num_bytes} expected")


def _damaged_blocks(
    checkpoint: Checkpoint, rank: int, start: int, stop: int, memory: memoryview
) -> list[CorruptCheckpointError]:
    """Read the blocks from byte ``start`` of the data on, into ``memory``."""
    file, header = checkpoint.manifest.files[rank], checkpoint.header(rank)
    buffer = memory[: stop - start]
    checkpoint.store.read_into(file.name, file.data_offset + start, buffer)
    found = []
    for at in range(0, len(buffer), BLOCK_BYTES):
        block = buffer[at : at + BLOCK_BYTES]
        first, last = start + at, start + at + len(block)
        if digest(block) != header.digests[first // BLOCK_BYTES]:
            held = list_names(names_between(header, first, last))
            where = f"bytes {file.data_offset + first} to {file.data_offset + last}"
            found.append(_damaged(checkpoint, rank, f"{where} changed; they hold {held}"))
    return found


def _lacking_chunks(checkpoint: Checkpoint) -> Iterator[CorruptCheckpointError]:
    num_lacking = 0
    for row in checkpoint.manifest.tensors:
        try:
            checkpoint.file_pieces(row, Box.whole(row.shape))
        except CorruptCheckpointError as e:
            yield e
            # What is found takes as long as the headers are; what is not could be any number.
            num_lacking += 1
            if num_lacking == MAX_LACKING:
                return


def _damaged(checkpoint: Checkpoint, rank: int, why: str) -> CorruptCheckpointError:
    manifest = checkpoint.manifest
    file = manifest.files[rank]
    return CorruptCheckpointError(
        f"step {manifest.step}: the shard of rank {rank}, {checkpoint.store.url}/{file.name}, is damaged: "
        f"{why}",
        step=manifest.step,
        attempt=manifest.attempt,
        rank=rank,
        key=file.name,
    )
