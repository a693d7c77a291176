"""One rank's shard file, made from a source through a bounded buffer instead of from an image.

    entries of the file, window by window: source --> two buffers --> digests, file        header last

Invariant: a file whose header is there is whole. A store that takes bytes in order gets the header first:
its digests come from a pass over the source that writes nothing.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from fsdp_ckpt.commit.source_images import Piece, SourceImages, reserve
from fsdp_ckpt.errors import CheckpointError, CorruptCheckpointError
from fsdp_ckpt.manifest.schema import FileRow
from fsdp_ckpt.manifest.shard import ShardHeader
from fsdp_ckpt.plan.box import Box, relative_slices
from fsdp_ckpt.plan.dtypes import itemsize
from fsdp_ckpt.plan.flat import flat_range_boxes
from fsdp_ckpt.plan.image import BLOCK_BYTES, Entry
from fsdp_ckpt.storage.in_order import InOrderWriter
from fsdp_ckpt.storage.shard_io import WRITE_BYTES, digest, run_all
from fsdp_ckpt.storage.store import Store

__all__ = ["Source", "StreamedShard", "read_whole"]

# Whole blocks, so that each window is digested as it is written.
WINDOW_BYTES = 64 * 1024 * 1024


class Source(Protocol):
    """Where tensors come from."""

    def pieces(self, name: str, wanted: Box) -> Sequence[Piece]:
        """Return the stored pieces that together make up the box ``wanted`` of a tensor."""
        ...

    def read(self, pieces: Iterable[Piece], num_threads: int | None = None) -> SourceImages:
        """Read all pieces."""
        ...


@dataclass(frozen=True, kw_only=True)
class StreamedShard:
    """A shard file to be written.

    Args:
        key: In the store.
        header: Without digests.
        source: Where the entries' bytes come from.
        own: Name → piece of the tensors that are the rank's own.
        num_threads: Reads or writes in flight; ``None`` as many as suit the stores.
    """

    key: str
    header: ShardHeader
    source: Source
    own: Mapping[str, Piece]
    num_threads: int | None

    def write(self, store: Store) -> FileRow:
        """Write the file; it is durable when this returns, and absent when this raises.

        Raises:
            CorruptCheckpointError: The source is damaged, or changed while it was read.
            StorageError: A store failed.
        """
        data_offset = len(self.header.to_bytes())
        num_bytes = data_offset + self.header.layout.data_bytes
        writer = store.write(self.key, num_bytes)
        threads = self.num_threads or store.concurrency
        try:
            if writer.ordered or writer.part_bytes:
                digests = self._pass(lambda byte_offset, data: None)
                header = self._sealed(digests)
                in_order = InOrderWriter(writer, num_bytes, threads)
                in_order.write_at(0, memoryview(header))
                put: Callable[[int, memoryview], None] = in_order.write_at
                if self._pass(lambda at, data: put(data_offset + at, data)) != digests:
                    raise CorruptCheckpointError(
                        f"{self.key}: the source changed while it was read; begin again",
                        key=self.key,
                    )
                in_order.commit()
            else:
                put = partial(_put, writer.write_at, threads)
                header = self._sealed(self._pass(lambda at, data: put(data_offset + at, data)))
                writer.flush()
                writer.write_at(0, memoryview(header))
                writer.commit()
        except BaseException:
            with suppress(CheckpointError):  # the first error is the one to know
                writer.abort()
            raise
        return FileRow(
            name=self.key, num_bytes=num_bytes, data_offset=data_offset, digest=digest(header)
        )

    def _sealed(self, digests: Sequence[str]) -> bytes:
        return dataclasses.replace(self.header, digests=tuple(digests)).to_bytes()

    def _pass(self, put: Callable[[int, memoryview], None]) -> list[str]:
        """Read the data window by window, each while the one before is put; return its blocks' digests."""
        data_bytes = self.header.layout.data_bytes
        starts = range(0, data_bytes, WINDOW_BYTES)
        buffers = [memoryview(reserve(min(WINDOW_BYTES, data_bytes))) for _ in starts[:2]]

        def finish(start: int, data: memoryview) -> list[str]:
            put(start, data)
            blocks = range(0, len(data), BLOCK_BYTES)
            return [digest(data[at : at + BLOCK_BYTES]) for at in blocks]

        digests: list[str] = []
        pending: Future[list[str]] | None = None
        with ThreadPoolExecutor(1, "fsdp_ckpt-window") as thread:
            for number, start in enumerate(starts):
                stop = min(start + WINDOW_BYTES, data_bytes)
                data = buffers[number % 2][: stop - start]
                _fill(self.source, self._parts(start, stop, data), self.num_threads)
                if pending is not None:
                    digests += pending.result()
                pending = thread.submit(finish, start, data)
            if pending is not None:
                digests += pending.result()
        return digests

    def _parts(
        self, start: int, stop: int, data: memoryview
    ) -> Iterator[tuple[Sequence[Piece], Box, np.ndarray]]:
        """Yield what the bytes [start, stop) of the data consist of: where it is, and where it goes."""
        entries = self.header.layout.entries
        first = bisect.bisect_right(entries, start, key=lambda e: e.byte_offset) - 1
        for entry in entries[max(first, 0) :]:
            if entry.byte_offset >= stop:
                return
            size = itemsize(entry.dtype)
            low = max(start - entry.byte_offset, 0)
            high = min(stop - entry.byte_offset, entry.num_bytes)
            at = entry.byte_offset + low - start
            # A window ends between two elements: entries are aligned, and blocks are.
            for part in flat_range_boxes(entry.box.sizes, low // size, high // size):
                pairs = zip(entry.box.offsets, part.offsets, strict=True)
                box = Box(tuple(a + b for a, b in pairs), part.sizes)
                num_bytes = box.num_elements * size
                yield self._pieces(entry, box), box, _shaped(data[at : at + num_bytes], box, size)
                at += num_bytes

    def _pieces(self, entry: Entry, box: Box) -> Sequence[Piece]:
        own = self.own.get(entry.name)
        if own is None:
            return self.source.pieces(entry.name, box)
        return [Piece(own.rank, own.entry, box)]


def read_whole(
    source: Source, wanted: Iterable[tuple[str, str, tuple[int, ...]]]
) -> dict[str, bytes]:
    """Return the content of whole tensors, (name, dtype, shape) each, row-major; meant for small ones."""
    found: dict[str, bytearray] = {}
    parts: list[tuple[Sequence[Piece], Box, np.ndarray]] = []
    for name, dtype, shape in wanted:
        box, size = Box.whole(shape), itemsize(dtype)
        found[name] = bytearray(box.num_elements * size)
        parts.append((source.pieces(name, box), box, _shaped(memoryview(found[name]), box, size)))
    _fill(source, parts, None)
    return {name: bytes(data) for name, data in found.items()}


def _shaped(data: memoryview, box: Box, size: int) -> np.ndarray:
    return np.frombuffer(data, np.uint8).reshape(*box.sizes, size)


def _fill(
    source: Source,
    parts: Iterable[tuple[Sequence[Piece], Box, np.ndarray]],
    num_threads: int | None,
) -> None:
    """Read pieces and copy each to its place in the box that it is of."""
    targets = [
        (piece, whole[relative_slices(piece.region, box)], whole.nbytes)
        for pieces, box, whole in parts
        for piece in pieces
    ]
    images = source.read((piece for piece, *_ in targets), num_threads)
    for piece, target, _ in targets:
        target[...] = images.array(piece)


def _put(
    write_at: Callable[[int, memoryview], None], threads: int, byte_offset: int, data: memoryview
) -> None:
    starts = range(0, len(data), WRITE_BYTES)
    run_all(
        (partial(write_at, byte_offset + at, data[at : at + WRITE_BYTES]) for at in starts), threads
    )
