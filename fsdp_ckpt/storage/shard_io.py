"""A shard's bytes on their way to a store and back, with the digests of its blocks.

write:  parts are put by several threads, blocks without a digest digested by another; the header, which holds
        the digests, goes last
read:   whole blocks straight into the caller's buffer, each verified as it arrives
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial

import xxhash

from fsdp_ckpt.errors import CheckpointError, CorruptCheckpointError
from fsdp_ckpt.storage.store import ObjectWriter, Store

__all__ = ["cut_ranges", "digest", "plan_reads", "run_all", "write_shard"]

WRITE_BYTES = 16 * 1024 * 1024
# By one thread, which keeps up with the disk. Where training has all cores busy, each further one would take
# as much of them again, at whatever priority.
NUM_DIGESTERS = 1
DIGEST_BYTES = 64 * 1024 * 1024  # at a time


def digest(data: bytes | memoryview) -> str:
    """Return xxh3_64 as 16 hex digits. Source: xxHash, https://xxhash.com."""
    # Not xxh3_64_hexdigest(data): before xxhash 4.0 that keeps the GIL, and threads digest one after another.
    return xxhash.xxh3_64(data).hexdigest()


def write_shard(
    writer: ObjectWriter,
    image: memoryview,
    *,
    data_offset: int,
    block_bytes: int,
    seal: Callable[[Sequence[str]], bytes],
    known: Callable[[int], str | None] = lambda block: None,
    wait_filled: Callable[[int], None] | None = None,
    beside: Iterable[Callable[[], None]] = (),
    num_threads: int,
) -> str:
    """Write one shard file; it is durable when this returns, and absent when this raises.

    Args:
        writer: Of the new object, of the image's size.
        image: The whole file; its header region is filled in here.
        data_offset: Start of the data in the image, in bytes.
        block_bytes: Bytes per digest.
        seal: Digests → header region of exactly ``data_offset`` bytes.
        known: Number of a block → its digest, where whoever filled the image has taken it; asked when all of
            it is there.
        wait_filled: Waits until the image holds so many bytes; by default it is whole already.
        beside: What else must have been done before the header is made.
        num_threads: Threads that write.

    Returns:
        Digest of the header region.

    Raises:
        StorageError: The store failed, on whichever thread; nothing stays.
    """
    try:
        data = image[data_offset:]
        digests = [""] * -(-len(data) // block_bytes)
        head, body = _cut(len(image), data_offset, writer.part_bytes or WRITE_BYTES, writer)

        def compute(start: int, stop: int) -> None:
            # Only now: who fills the image needs the processor, who writes it hardly does.
            if wait_filled is not None:
                wait_filled(len(image))
            for at in range(start, stop, block_bytes):
                block = at // block_bytes
                digests[block] = known(block) or digest(data[at : min(at + block_bytes, stop)])

        def put(start: int, stop: int) -> None:
            if wait_filled is not None:
                wait_filled(stop)
            writer.write_at(start, image[start:stop])

        early = [] if writer.ordered else [span for span in body if span[0] >= head]
        step = max(DIGEST_BYTES // block_bytes, 1) * block_bytes
        starts = range(0, len(data), step)
        digesting = (partial(compute, at, min(at + step, len(data))) for at in starts)
        with running(beside, 1), running(digesting, NUM_DIGESTERS):
            run_all((partial(put, *span) for span in early), num_threads)
        header = seal(digests)
        if len(header) != data_offset:
            raise AssertionError(f"header of {len(header)} bytes in a region of {data_offset}")
        image[:data_offset] = header
        writer.flush()
        # A file whose header is there is whole.
        for start, stop in body:
            if start < head or writer.ordered:
                writer.write_at(start, image[start:stop])
        writer.commit()
    except BaseException:
        with suppress(CheckpointError, OSError):  # the first error is the one to know
            writer.abort()
        raise
    return digest(header)


def _cut(
    num_bytes: int, data_offset: int, part_bytes: int, writer: ObjectWriter
) -> tuple[int, list[tuple[int, int]]]:
    """Cut a file into parts; those that start before the returned offset hold the header."""
    if writer.part_bytes:
        starts = list(range(0, num_bytes, part_bytes))
        head = -(-data_offset // part_bytes) * part_bytes
    else:
        starts = [0, *range(data_offset, num_bytes, part_bytes)]
        head = data_offset
    return head, list(zip(starts, [*starts[1:], num_bytes], strict=True))


def run_all(calls: Iterable[Callable[[], None]], num_threads: int) -> None:
    """Make all calls, in several threads; the first failure ends it."""
    with running(calls, num_threads):
        pass


@contextmanager
def running(calls: Iterable[Callable[[], None]], num_threads: int) -> Iterator[None]:
    """Make all calls, in several threads, beside what is done inside; a failure of either ends both."""
    with ThreadPoolExecutor(num_threads, "fsdp_ckpt-io") as threads:
        try:
            pending = [threads.submit(call) for call in calls]
            yield
            for future in pending:
                future.result()
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def plan_reads(
    store: Store,
    key: str,
    ranges: Iterable[tuple[int, int]],
    buffer: memoryview,
    *,
    data_offset: int,
    block_bytes: int,
    digests: Sequence[str],
    explain: Callable[[int, int], str],
    origin: int = 0,
    take: Callable[[int, memoryview], None] | None = None,
    fill: Callable[[int, int], None] | None = None,
) -> Iterator[Callable[[], None]]:
    """Cut the reading of parts of a shard's data into calls, for any threads; each verifies its part.

    Args:
        store: Where from.
        key: The shard's key.
        ranges: Half-open byte ranges of the data; each starts on a block and ends on one or with the data.
        buffer: For the data from ``origin`` on; only the ranges are touched.
        data_offset: Start of the data in the file, in bytes.
        block_bytes: Bytes per digest.
        digests: Expected digests, one per block.
        explain: (start, stop) of a block → what it holds, for the error.
        origin: Byte of the data with which ``buffer`` begins.
        take: Called with each verified block, its first byte in the data and its bytes.
        fill: Returns once the buffer has the bytes from a start to a stop of the data, from elsewhere; only
            blocks of them that are damaged are read.

    Raises:
        CorruptCheckpointError: By a call: a block's digest differs.
        StorageError: By a call: the store failed, or the file is too short.
    """

    def read(start: int, stop: int) -> None:
        if fill is not None:
            fill(start, stop)
        else:
            store.read_into(key, data_offset + start, buffer[start - origin : stop - origin])
        for at in range(start, stop, block_bytes):
            end = min(at + block_bytes, stop)
            block = buffer[at - origin : end - origin]
            found = digest(block)
            expected = digests[at // block_bytes]
            if found != expected and fill is not None:
                store.read_into(key, data_offset + at, block)
                found = digest(block)
            if found != expected:
                raise CorruptCheckpointError(
                    f"{key}: bytes {data_offset + at} to {data_offset + end} are damaged (digest {found}, "
                    f"{expected} expected): {explain(at, end)}",
                    key=key,
                )
            if take is not None:
                take(at, block)

    for start, stop in cut_ranges(ranges, block_bytes, store.read_bytes):
        yield partial(read, start, stop)


def cut_ranges(
    ranges: Iterable[tuple[int, int]], block_bytes: int, read_bytes: int
) -> Iterator[tuple[int, int]]:
    """Cut byte ranges into what one request each reads."""
    # Whole blocks: what one call reads, one call can verify.
    piece = max(read_bytes // block_bytes, 1) * block_bytes
    for first, last in ranges:
        for at in range(first, last, piece):
            yield at, min(at + piece, last)
