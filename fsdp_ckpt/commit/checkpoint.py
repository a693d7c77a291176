"""One committed checkpoint, open for verified reading.

    manifest --layout--> which ranks' files hold a box --header--> where in the file --blocks--> bytes

Invariant: no byte is handed out whose block's digest was not checked. Reads go into *source images*:
parts of one buffer, each laid out like the file it comes from, of which only the needed blocks are touched.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property

from fsdp_ckpt.commit.holdings import held_tensors, list_names
from fsdp_ckpt.commit.piece_reads import PieceReads
from fsdp_ckpt.commit.publish import MANIFEST_KEY, read_manifest
from fsdp_ckpt.commit.source_images import (
    INLINE,
    Piece,
    SourceImages,
    Span,
    allocate_sparsely,
    reserve,
)
from fsdp_ckpt.errors import CorruptCheckpointError, NotFoundError, StorageError
from fsdp_ckpt.manifest.schema import Manifest, TensorRow
from fsdp_ckpt.manifest.shard import MAX_HEADER_BYTES, ShardHeader
from fsdp_ckpt.plan.box import Box, overlap
from fsdp_ckpt.plan.image import Entry
from fsdp_ckpt.storage.at_hand import AtHand
from fsdp_ckpt.storage.shard_io import digest
from fsdp_ckpt.storage.store import Store

__all__ = ["Checkpoint", "Piece", "SourceImages"]

NAMED_DAMAGES = 16


class Checkpoint:
    """A committed checkpoint.

    Args:
        store: Its folder.
        manifest: As read from there.
    """

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.store = store
        self.manifest = manifest
        self._headers: dict[int, ShardHeader] = {}
        self._entries: dict[int, dict[tuple[str, tuple[int, ...]], Entry]] = {}
        self._own: dict[int, dict[str, Entry]] = {}
        self._num_damages = 0
        self._locks: dict[int, threading.Lock] = {}

    @classmethod
    def open(cls, store: Store) -> Checkpoint:
        """Read the manifest at ``store``.

        Raises:
            NotFoundError: No checkpoint here.
            CorruptCheckpointError: The manifest is damaged, or claims what its files cannot hold.
            UnsupportedFormatError: Of a newer format version.
        """
        manifest = read_manifest(store)
        _refuse_claims(manifest, f"{store.url}/{MANIFEST_KEY}")
        return cls(store, manifest)

    @cached_property
    def rows(self) -> dict[str, TensorRow]:
        """Tensor rows by name."""
        return {row.name: row for row in self.manifest.tensors}

    @cached_property
    def _inline(self) -> dict[str, Entry]:
        """Entries of the image that the manifest's inline tensors make up."""
        entries, position = {}, 0
        for name, data in self.manifest.inline.items():
            row = self.rows[name]
            box = Box.whole(row.shape)
            entries[name] = Entry(
                key=name,
                name=name,
                dtype=row.dtype,
                shape=row.shape,
                box=box,
                byte_offset=position,
            )
            # The next one starts aligned for any dtype.
            position += -(-len(data) // 16) * 16
        return entries

    @cached_property
    def _inline_image(self) -> bytearray:
        data = bytearray(16 * (1 + sum(-(-len(d) // 16) for d in self.manifest.inline.values())))
        for name, entry in self._inline.items():
            data[entry.byte_offset : entry.byte_offset + entry.num_bytes] = self.manifest.inline[
                name
            ]
        return data

    def header(self, rank: int) -> ShardHeader:
        """Return the verified header of a rank's file.

        Raises:
            CorruptCheckpointError: The file is missing, short or damaged.
        """
        with self._locks.setdefault(rank, threading.Lock()):
            if rank not in self._headers:
                header = self._read_header(rank)
                own = [e for e in header.layout.entries if e.name in header.own]
                self._own[rank] = {e.name: e for e in own}
                if len(self._own[rank]) != len(own) or any(
                    e.box != Box.whole(e.shape) for e in own
                ):
                    raise self.damaged(rank, "a tensor of its own is not whole")
                self._entries[rank] = {(e.name, e.box.offsets): e for e in header.layout.entries}
                self._headers[rank] = header
            return self._headers[rank]

    def _read_header(self, rank: int) -> ShardHeader:
        file = self.manifest.files[rank]
        where = f"{self.store.url}/{file.name}"
        if file.data_offset > MAX_HEADER_BYTES:
            raise self.damaged(rank, f"a header of {file.data_offset} bytes")
        # Not touched beyond what the file really has.
        region = memoryview(reserve(file.data_offset))
        with self.reading(rank):
            self.store.read_into(file.name, 0, region)
        if digest(region) != file.digest:
            raise self.damaged(rank, "the header's digest does not match")
        header = ShardHeader.from_bytes(bytes(region), where)
        same = (header.attempt, header.rank, header.world_size, header.step) == (
            self.manifest.attempt,
            rank,
            self.manifest.world_size,
            self.manifest.step,
        )
        if not same or file.data_offset + header.layout.data_bytes != file.num_bytes:
            raise self.damaged(rank, "the header is of another save")
        return header

    def damaged(self, rank: int, why: str) -> CorruptCheckpointError:
        """Return the error that says why a rank's file is damaged, and what the first such files hold."""
        file = self.manifest.files[rank]
        # To look it up for all of thousands of files would take their number times that of the tensors.
        self._num_damages += 1
        held = f"; it holds {self.holdings(rank)}" if self._num_damages <= NAMED_DAMAGES else ""
        return CorruptCheckpointError(
            f"step {self.manifest.step}: the shard of rank {rank}, {self.store.url}/{file.name}, is damaged: "
            f"{why}{held}",
            step=self.manifest.step,
            attempt=self.manifest.attempt,
            rank=rank,
            key=file.name,
        )

    @contextmanager
    def reading(self, rank: int) -> Iterator[None]:
        """Map what can go wrong with a rank's file; say step, rank, file and tensors."""
        file = self.manifest.files[rank]
        try:
            yield
        except NotFoundError as e:
            raise self.damaged(rank, "it is missing") from e
        except CorruptCheckpointError as e:
            raise self.damaged(rank, str(e)) from e
        except StorageError as e:
            # A short file is damage; a store that cannot be reached now is not.
            try:
                found = self.store.size(file.name)
            except NotFoundError:
                found = 0
            if found != file.num_bytes:
                raise self.damaged(rank, f"it has {found} of {file.num_bytes} bytes") from e
            raise

    def holdings(self, rank: int) -> str:
        """Say which tensors a rank's file holds, from the manifest alone; for errors."""
        return list_names(held_tensors(self.manifest, rank))

    def check_files(self, sizes: Mapping[str, int] | None = None) -> None:
        """Check that every shard file is there with its size; reads no data.

        Args:
            sizes: Key → bytes of what the checkpoint's folder holds, where it was listed already.

        Raises:
            CorruptCheckpointError: One is missing or has another size; names step, rank, file and tensors.
        """
        listed = self._list_attempts() if sizes is None else sizes
        for rank, file in enumerate(self.manifest.files):
            found = listed.get(file.name)
            if found is None:
                raise self.damaged(rank, "it is missing")
            if found != file.num_bytes:
                raise self.damaged(rank, f"it has {found} bytes, {file.num_bytes} expected")

    def _list_attempts(self) -> dict[str, int]:
        """Return key → bytes of what lies in the folders that the manifest names."""
        folders = dict.fromkeys(file.name.rpartition("/")[0] for file in self.manifest.files)
        return {
            f"{folder}/{name}": num_bytes
            for folder in folders
            for name, num_bytes in self.store.child(folder).list_files().items()
        }

    def pieces(self, row: TensorRow, wanted: Box) -> list[Piece]:
        """Return the stored pieces that together make up ``wanted``, a box of the row's tensor."""
        if row.name in self._inline and wanted.num_elements:
            return [Piece(INLINE, self._inline[row.name], wanted)]
        return self.file_pieces(row, wanted)

    def file_pieces(self, row: TensorRow, wanted: Box) -> list[Piece]:
        """Return the pieces in shard files, also of tensors that the manifest holds too."""
        return [
            self._piece(row, rank, box, region)
            for rank, box in row.overlapping(wanted)
            if (region := overlap(box, wanted)) is not None
        ]

    def _piece(self, row: TensorRow, rank: int, box: Box, region: Box) -> Piece:
        """Return the part ``region`` of the chunk ``box`` that ``rank`` has written.

        Raises:
            CorruptCheckpointError: The rank's file is damaged, or lacks the chunk.
        """
        self.header(rank)
        entry = self._entries[rank].get((row.name, box.offsets))
        if entry is None or (entry.box, entry.dtype, entry.shape) != (box, row.dtype, row.shape):
            raise CorruptCheckpointError(
                f"step {self.manifest.step}: the shard of rank {rank}, {self.manifest.files[rank].name}, "
                f"lacks the chunk of {row.name} at {box.offsets}",
                step=self.manifest.step,
                rank=rank,
                key=row.name,
            )
        return Piece(rank, entry, region)

    def own_piece(self, rank: int, name: str) -> Piece | None:
        """Return the tensor that is rank's own under ``name``, or ``None``."""
        header = self.header(rank)
        if name not in header.own:
            return None
        entry = self._own[rank][name]
        return Piece(rank, entry, entry.box)

    def read(
        self,
        pieces: Iterable[Piece],
        num_threads: int | None = None,
        allocate: Callable[[int], memoryview] | None = None,
        take: Callable[[int, int, memoryview], None] | None = None,
        at_hand: Callable[[int], AtHand | None] = lambda rank: None,
    ) -> SourceImages:
        """Read all pieces, verified.

        Args:
            pieces: What to read.
            num_threads: Reads in flight; by default as many as suit the store.
            allocate: As for :class:`PieceReads`; memory of its own by default.
            take: As for :class:`PieceReads`.
            at_hand: As for :class:`PieceReads`.

        Raises:
            CorruptCheckpointError: Missing, short or damaged; names step, rank, file and tensors.
            StorageError: The store failed in a way that may pass.
        """
        reads = PieceReads(
            store=self.store,
            files=self.manifest.files,
            header=self.header,
            guard=self.reading,
            allocate=allocate or allocate_sparsely,
            at_hand=at_hand,
            take=take,
            num_threads=num_threads or self.store.concurrency,
        )
        return reads.read(self.spans(pieces), self._inline_image)

    def spans(self, pieces: Iterable[Piece]) -> dict[int, Span]:
        """Return, for each rank's file, what is wanted and from where to where it reaches."""
        spans: dict[int, Span] = {}
        for piece in pieces:
            if piece.rank == INLINE:
                continue
            if piece.rank not in spans:
                spans[piece.rank] = Span(self.header(piece.rank).layout.data_bytes)
            spans[piece.rank].add(*piece.byte_range, piece.entry)
        return spans


def _refuse_claims(manifest: Manifest, where: str) -> None:
    """Refuse what no save writes, before anyone makes room for it."""
    claimed = sum(row.num_bytes for row in manifest.tensors)
    held = sum(file.num_bytes for file in manifest.files)
    # 64-bit arithmetic on offsets holds below this.
    if claimed > held or held >= 2**62:
        raise CorruptCheckpointError(
            f"{where}: tensors of {claimed} bytes in files of {held}", key=where
        )
