"""Proof that a checkpoint on storage is what was written: every byte of every file, read once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from fsdp_ckpt.commit.checkpoint import Checkpoint
from fsdp_ckpt.commit.holdings import list_names, names_between
from fsdp_ckpt.errors import CorruptCheckpointError, NotFoundError
from fsdp_ckpt.plan.box import Box
from fsdp_ckpt.plan.image import BLOCK_BYTES
from fsdp_ckpt.storage.shard_io import digest

__all__ = ["find_damage"]

READ_BYTES = 32 * 1024 * 1024  # whole blocks
MAX_LACKING = 100


def find_damage(checkpoint: Checkpoint, num_threads: int = 2) -> Iterator[CorruptCheckpointError]:
    """Yield everything that is wrong with an open checkpoint, file by file; nothing if it is whole.

    Checked are sizes, headers, the digest of every block, and that every chunk of every tensor is in the file
    that the manifest names. That the chunks cover the tensors was proven when the manifest was opened. Holds
    at most 32 MiB per thread.

    Args:
        checkpoint: Open.
        num_threads: Reads in flight.

    Raises:
        StorageError: The store cannot be read now.
    """
    readable = []
    for rank in range(checkpoint.manifest.world_size):
        try:
            _check_size(checkpoint, rank)
            checkpoint.header(rank)
            readable.append(rank)
        except CorruptCheckpointError as e:
            yield e
    spans = [
        (rank, start)
        for rank in readable
        for start in range(0, checkpoint.header(rank).layout.data_bytes, READ_BYTES)
    ]
    with ThreadPoolExecutor(num_threads, "fsdp_ckpt-verify") as threads:
        for found in threads.map(lambda span: _damaged_blocks(checkpoint, *span), spans):
            yield from found
    if len(readable) == checkpoint.manifest.world_size:
        yield from _lacking_chunks(checkpoint)


def _check_size(checkpoint: Checkpoint, rank: int) -> None:
    file = checkpoint.manifest.files[rank]
    try:
        found = checkpoint.store.size(file.name)
    except NotFoundError as e:
        raise checkpoint.damaged(rank, "it is missing") from e
    if found != file.num_bytes:
        raise checkpoint.damaged(rank, f"it has {found} bytes, {file.num_bytes} expected")


def _damaged_blocks(checkpoint: Checkpoint, rank: int, start: int) -> list[CorruptCheckpointError]:
    """Read the blocks from byte ``start`` of the data on, ``READ_BYTES`` of them."""
    file, header = checkpoint.manifest.files[rank], checkpoint.header(rank)
    buffer = memoryview(bytearray(min(READ_BYTES, header.layout.data_bytes - start)))
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
