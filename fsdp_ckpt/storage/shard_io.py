"""A shard's bytes on their way to a store and back, with the digests of its blocks.

write:  every block is digested and put in one pass, by several threads; the header, which holds the
        digests, goes last
read:   whole blocks straight into the caller's buffer, each verified as it arrives
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import xxhash

from fsdp_ckpt.errors import CheckpointError, CorruptCheckpointError
from fsdp_ckpt.storage.store import ObjectWriter, Store

__all__ = ["digest", "read_ranges", "write_shard"]

READ_BYTES = 32 * 1024 * 1024


def digest(data: bytes | memoryview) -> str:
    """Return xxh3_64 as 16 hex digits. Source: xxHash, https://xxhash.com."""
    return xxhash.xxh3_64_hexdigest(data)


def write_shard(
    store: Store,
    key: str,
    image: memoryview,
    *,
    data_offset: int,
    block_bytes: int,
    seal: Callable[[Sequence[str]], bytes],
    num_threads: int = 2,
) -> str:
    """Write one shard file; it is durable when this returns, and absent when this raises.

    Args:
        store: Where to.
        key: New object's key.
        image: The whole file, its header region still blank.
        data_offset: Start of the data in the image, in bytes.
        block_bytes: Bytes per digest.
        seal: Digests → header region of exactly ``data_offset`` bytes.
        num_threads: Threads that digest and write.

    Returns:
        Digest of the header region.

    Raises:
        StorageError: The store failed, on whichever thread; nothing stays under the key.
    """
    data = image[data_offset:]
    writer = store.write(key, len(image))
    try:
        starts = range(0, len(data), block_bytes)

        def put(start: int) -> str:
            block = data[start : start + block_bytes]
            if not writer.ordered:
                writer.write_at(data_offset + start, block)
            return digest(block)

        with ThreadPoolExecutor(num_threads, "fsdp_ckpt-write") as threads:
            digests = list(threads.map(put, starts))
        header = seal(digests)
        if len(header) != data_offset:
            raise AssertionError(f"header of {len(header)} bytes in a region of {data_offset}")
        _put_header(writer, header, data)
        writer.commit()
    except BaseException:
        with suppress(CheckpointError, OSError):  # the first error is the one to know
            writer.abort()
        raise
    return digest(header)


def _put_header(writer: ObjectWriter, header: bytes, data: memoryview) -> None:
    writer.write_at(0, memoryview(header))
    if writer.ordered:
        for start in range(0, len(data), READ_BYTES):
            writer.write_at(len(header) + start, data[start : start + READ_BYTES])


def read_ranges(
    store: Store,
    key: str,
    ranges: Iterable[tuple[int, int]],
    buffer: memoryview,
    *,
    data_offset: int,
    block_bytes: int,
    digests: Sequence[str],
    explain: Callable[[int, int], str],
    num_threads: int = 2,
) -> None:
    """Read parts of a shard's data, verified, into the same positions of ``buffer``.

    Args:
        store: Where from.
        key: The shard's key.
        ranges: Half-open byte ranges of the data; each starts on a block and ends on one or with the data.
        buffer: The data's length in bytes; only the ranges are touched.
        data_offset: Start of the data in the file, in bytes.
        block_bytes: Bytes per digest.
        digests: Expected digests, one per block.
        explain: (start, stop) of a block → what it holds, for the error.
        num_threads: Reads in flight.

    Raises:
        CorruptCheckpointError: A block's digest differs.
        StorageError: The store failed, or the file is too short.
    """
    # A piece is some whole blocks, so that every digest is checked while its bytes are in the cache.
    piece = max(READ_BYTES // block_bytes, 1) * block_bytes

    def read(start: int, stop: int) -> None:
        store.read_into(key, data_offset + start, buffer[start:stop])
        for at in range(start, stop, block_bytes):
            end = min(at + block_bytes, stop)
            found, expected = digest(buffer[at:end]), digests[at // block_bytes]
            if found != expected:
                raise CorruptCheckpointError(
                    f"{key}: bytes {data_offset + at} to {data_offset + end} are damaged (digest {found}, "
                    f"{expected} expected): {explain(at, end)}",
                    key=key,
                )

    pieces = [
        (at, min(at + piece, stop)) for start, stop in ranges for at in range(start, stop, piece)
    ]
    with ThreadPoolExecutor(num_threads, "fsdp_ckpt-read") as threads:
        for _ in threads.map(lambda span: read(*span), pieces):
            pass
