"""Reading pieces of several shard files into one buffer, verified.

    span of each file -> ranges -> Reading (or what is at hand) -> digests -> taken

Some threads read, others verify what has come; no byte is handed out whose block's digest was not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from fsdp_ckpt.commit.holdings import list_names, names_between
from fsdp_ckpt.commit.source_images import INLINE, SourceImages, Span
from fsdp_ckpt.manifest.schema import FileRow
from fsdp_ckpt.manifest.shard import ShardHeader
from fsdp_ckpt.plan.image import BLOCK_BYTES, PAGE_BYTES, coalesce_ranges
from fsdp_ckpt.storage.at_hand import AtHand, Reading
from fsdp_ckpt.storage.shard_io import plan_reads, run_all
from fsdp_ckpt.storage.store import Store

__all__ = ["PieceReads"]

# Threads that verify what the others have read, and hand it over: each as fast as a disk.
NUM_CHECKERS = 2

Take = Callable[[int, int, memoryview], None]


@dataclass(frozen=True, kw_only=True)
class PieceReads:
    """How a checkpoint's files are read.

    Args:
        store: The checkpoint's folder.
        files: Its shard files, by rank.
        header: Rank → header of its file.
        guard: Rank → context that maps what goes wrong with its file.
        allocate: Number of bytes → page-aligned buffer, of which only what is read is touched.
        at_hand: Rank → memory that has its file's data already, or soon.
        take: Called with each verified block, by some thread: the rank whose file it is of, its first byte in
            the file's data, and its bytes, which may be changed.
        num_threads: Reads in flight.
    """

    store: Store
    files: Sequence[FileRow]
    header: Callable[[int], ShardHeader]
    guard: Callable[[int], AbstractContextManager[None]]
    allocate: Callable[[int], memoryview]
    at_hand: Callable[[int], AtHand | None]
    take: Take | None
    num_threads: int

    def read(self, spans: Mapping[int, Span], inline: bytes | bytearray) -> SourceImages:
        """Read what is wanted of each file.

        Args:
            spans: Rank → what is wanted of its file.
            inline: What the manifest holds itself.

        Raises:
            CorruptCheckpointError: Missing, short or damaged; names step, rank, file and tensors.
            StorageError: The store failed in a way that may pass.
        """
        buffers = {INLINE: (0, memoryview(inline))}
        checks: list[Callable[[], None]] = []
        with ThreadPoolExecutor(self.num_threads, "fsdp_ckpt-read") as threads:
            try:
                absent: dict[int, Span] = {}
                for rank, span in spans.items():
                    held = self.at_hand(rank)
                    if held is None:
                        absent[rank] = span
                    else:
                        buffers[rank] = 0, held.data
                        checks += self._checks(rank, span, held, origin=0)
                for rank, memory in self._allocate(absent).items():
                    file, span = self.files[rank], absent[rank]
                    buffers[rank] = span.start, memory
                    reading = Reading(
                        self.store,
                        file.name,
                        file.data_offset,
                        memory,
                        block_bytes=BLOCK_BYTES,
                        threads=threads,
                        origin=span.start,
                    )
                    checks += self._checks(rank, span, reading, origin=span.start)
                run_all(checks, NUM_CHECKERS)
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise
        return SourceImages(buffers)

    def _allocate(self, spans: Mapping[int, Span]) -> dict[int, memoryview]:
        """Return memory for each span, parts of one buffer that start on a page."""
        rooms = {r: -(-(span.stop - span.start) // PAGE_BYTES) for r, span in spans.items()}
        # Not even an empty buffer where all is at hand: a pool would trim one for it.
        memory = self.allocate(sum(rooms.values()) * PAGE_BYTES) if rooms else memoryview(b"")
        parts, position = {}, 0
        for rank, span in spans.items():
            parts[rank] = memory[position : position + span.stop - span.start]
            position += rooms[rank] * PAGE_BYTES
        return parts

    def _checks(
        self, rank: int, span: Span, at_hand: AtHand, *, origin: int
    ) -> Iterable[Callable[[], None]]:
        """Have what is wanted of a file come, and return calls that wait for its parts and verify them."""
        file, header = self.files[rank], self.header(rank)
        ranges = list(coalesce_ranges(span.ranges, self.store.gap_bytes))
        at_hand.want(ranges)
        checks = plan_reads(
            self.store,
            file.name,
            ranges,
            at_hand.data,
            data_offset=file.data_offset,
            block_bytes=BLOCK_BYTES,
            digests=header.digests,
            explain=lambda start, stop: list_names(names_between(header, start, stop)),
            origin=origin,
            take=None if self.take is None else partial(self.take, rank),
            fill=at_hand.fill,
        )

        def guarded(check: Callable[[], None]) -> None:
            with self.guard(rank):
                check()

        return [partial(guarded, check) for check in checks]
