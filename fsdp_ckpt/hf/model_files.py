"""A model in Hugging Face's form on storage: its safetensors files, and reading of parts of them.

    model.safetensors, or its index --> headers --> rows: name, dtype, shape
    pieces of rows --> ranges, coalesced per file --> source images

Invariant: only the ranges asked for are read, and a file that is shorter or longer than its header says is
refused before that. The files have no digests: what rotted inside a tensor cannot be noticed here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from fsdp_ckpt.commit.source_images import Piece, SourceImages, allocate_sparsely
from fsdp_ckpt.errors import CheckpointError, CorruptCheckpointError, NotFoundError
from fsdp_ckpt.manifest.fields import counts, shown, text
from fsdp_ckpt.manifest.schema import TensorRow
from fsdp_ckpt.manifest.shard import MAX_HEADER_BYTES
from fsdp_ckpt.manifest.strict_json import brief, parse_json
from fsdp_ckpt.manifest.typed_json import Json
from fsdp_ckpt.plan.box import Box
from fsdp_ckpt.plan.coverage import MAX_DIMS
from fsdp_ckpt.plan.dtypes import itemsize, stored_form
from fsdp_ckpt.plan.image import PAGE_BYTES, Entry, coalesce_ranges
from fsdp_ckpt.plan.layouts import ListedLayout
from fsdp_ckpt.plan.ranges import box_ranges
from fsdp_ckpt.storage.local import LocalStore
from fsdp_ckpt.storage.shard_io import run_all
from fsdp_ckpt.storage.store import Store

__all__ = ["ModelFile", "ModelFiles", "open_model_files"]

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """One safetensors file.

    Args:
        name: Its key in the folder.
        data_offset: Start of the data, in bytes.
        entries: Its tensors, each whole.
    """

    name: str
    data_offset: int
    entries: tuple[Entry, ...]

    def to_json(self) -> Json:
        """Return plain data."""
        rows = [[e.name, e.dtype, list(e.shape), e.byte_offset] for e in self.entries]
        return [self.name, self.data_offset, rows]

    @classmethod
    def from_json(cls, encoded: Sequence[Any]) -> ModelFile:
        """Rebuild what :meth:`to_json` described."""
        name, data_offset, rows = encoded
        entries = (_entry(key, dtype, tuple(shape), start) for key, dtype, shape, start in rows)
        return cls(name=name, data_offset=data_offset, entries=tuple(entries))


class ModelFiles:
    """The files of one model, open for reading.

    Args:
        store: Their folder.
        files: As read from there.
    """

    def __init__(self, store: Store, files: Sequence[ModelFile]) -> None:
        self.store = store
        self.files = tuple(files)
        self._where = {e.name: (i, e) for i, file in enumerate(files) for e in file.entries}

    @cached_property
    def rows(self) -> tuple[TensorRow, ...]:
        """One row per tensor, in the files' order, as if each file were a rank's and held it whole."""
        return tuple(
            TensorRow(
                path=(entry.name,),
                dtype=entry.dtype,
                shape=entry.shape,
                layout=ListedLayout.of([(i, entry.box)]),
            )
            for i, entry in self._where.values()
        )

    def pieces(self, name: str, wanted: Box) -> list[Piece]:
        """Return the stored piece that is the box ``wanted`` of a tensor; none for a box without elements."""
        i, entry = self._where[name]
        return [Piece(i, entry, wanted)] if wanted.num_elements else []

    def read(self, pieces: Iterable[Piece], num_threads: int | None = None) -> SourceImages:
        """Read all pieces.

        Args:
            pieces: What to read.
            num_threads: Reads in flight; by default as many as suit the store.

        Raises:
            NotFoundError: A file has gone.
            StorageError: The store failed, or a file has become shorter.
        """
        by_file: dict[int, list[Piece]] = {}
        for piece in pieces:
            by_file.setdefault(piece.rank, []).append(piece)
        buffers: dict[int, tuple[int, memoryview]] = {}
        calls: list[Callable[[], None]] = []
        for i, found in by_file.items():
            data_offset = self.files[i].data_offset
            start = min(piece.entry.byte_offset for piece in found)
            # Where the memory starts on a page, so do the file's pages, for direct I/O.
            origin = start - (data_offset + start) % PAGE_BYTES
            stop = max(piece.entry.byte_offset + piece.entry.num_bytes for piece in found)
            buffers[i] = origin, allocate_sparsely(stop - origin)
            calls += self._reads(i, found, *buffers[i])
        run_all(calls, num_threads or self.store.concurrency)
        return SourceImages(buffers)

    def _reads(
        self, i: int, pieces: Iterable[Piece], origin: int, buffer: memoryview
    ) -> list[Callable[[], None]]:
        file = self.files[i]
        store, key = locate_file(self.store, file.name)
        ranges = (
            (piece.entry.byte_offset + start, piece.entry.byte_offset + stop)
            for piece in pieces
            for start, stop in box_ranges(
                piece.region, piece.entry.box, itemsize(piece.entry.dtype), store.gap_bytes
            )
        )
        return [
            partial(
                store.read_into,
                key,
                file.data_offset + at,
                buffer[at - origin : min(at + store.read_bytes, stop) - origin],
            )
            for start, stop in coalesce_ranges(ranges, store.gap_bytes)
            for at in range(start, stop, store.read_bytes)
        ]


def locate_file(store: Store, name: str) -> tuple[Store, str]:
    """Return the store and key under which a file of the folder is read.

    A local store refuses links that lead out of its folder; those of Hugging Face's cache do, each to a blob.
    """
    if isinstance(store, LocalStore):
        folder, key = os.path.split(os.path.realpath(os.path.join(store.url, name)))
        return LocalStore(folder), key
    return store, name


def open_model_files(store: Store, num_threads: int | None = None) -> ModelFiles:
    """Read the headers of a model's files; no tensor is read.

    The folder's ``model.safetensors``, else the files of its index, else its only safetensors file.

    Args:
        store: The folder.
        num_threads: Headers in flight.

    Raises:
        NotFoundError: No safetensors files here, or one that the index names is missing.
        CorruptCheckpointError: Index or header is malformed, a file has not the size that its header gives,
            or lacks a tensor that the index says is in it.
        StorageError: The store failed.
    """
    sizes = store.list_files()
    names = _file_names(store, sizes)
    with ThreadPoolExecutor(num_threads or store.concurrency, "fsdp_ckpt-headers") as threads:
        files = list(threads.map(lambda name: _read_header(store, name, sizes), names))
    return ModelFiles(store, [_only(file, names[file.name], store) for file in files])


def _file_names(store: Store, sizes: Mapping[str, int]) -> dict[str, frozenset[str] | None]:
    """Return file → names of its tensors as the index has them, or ``None`` where there is no index."""
    if SINGLE_NAME in sizes:
        return {SINGLE_NAME: None}
    if INDEX_NAME in sizes:
        return dict(_read_index(store, sizes[INDEX_NAME]))
    found = [name for name in sizes if name.endswith(".safetensors")]
    if len(found) == 1:
        return {found[0]: None}
    raise NotFoundError(
        f"{store.url}: no {SINGLE_NAME} and no {INDEX_NAME} here, and {len(found)} other safetensors files; "
        "name the model's folder (weights in a pickle, such as pytorch_model.bin, are never read)"
    )


def _read_index(store: Store, num_bytes: int) -> dict[str, frozenset[str]]:
    where = f"{store.url}/{INDEX_NAME}"
    home, key = locate_file(store, INDEX_NAME)
    by_file: dict[str, set[str]] = {}
    try:
        if num_bytes > MAX_HEADER_BYTES:
            raise CorruptCheckpointError(f"{num_bytes} bytes")
        for name, file in parse_json(home.read(key))["weight_map"].items():
            if text(file) in ("", ".", "..") or "/" in file:
                raise CorruptCheckpointError(f"{shown(file)} is not a file of this folder")
            by_file.setdefault(file, set()).add(name)
    except CorruptCheckpointError as e:
        raise CorruptCheckpointError(f"{where}: malformed index ({brief(e)})", key=where) from e
    except (KeyError, TypeError, AttributeError) as e:
        raise CorruptCheckpointError(f"{where}: no index: weight_map is missing", key=where) from e
    return {file: frozenset(by_file[file]) for file in sorted(by_file)}


def _read_header(store: Store, name: str, sizes: Mapping[str, int]) -> ModelFile:
    """Read and check one file's header.

    Source: https://huggingface.co/docs/safetensors, "Format".
    """
    where = f"{store.url}/{name}"
    if name not in sizes:
        raise NotFoundError(f"{where}: missing, although the index names it", key=name)
    home, key = locate_file(store, name)
    try:
        if sizes[name] < 8:
            raise CorruptCheckpointError(f"{sizes[name]} bytes")
        length = bytearray(8)
        home.read_into(key, 0, memoryview(length))
        size = int.from_bytes(length, "little")
        if size > min(MAX_HEADER_BYTES, sizes[name] - 8):
            raise CorruptCheckpointError(f"a header of {size} bytes in a file of {sizes[name]}")
        region = bytearray(size)
        home.read_into(key, 8, memoryview(region))
        entries = _entries(parse_json(bytes(region)), sizes[name] - 8 - size)
    except CorruptCheckpointError as e:
        raise CorruptCheckpointError(
            f"{where}: not a whole safetensors file ({brief(e)})", key=name
        ) from e
    return ModelFile(name=name, data_offset=8 + size, entries=entries)


def _entries(header: Mapping[str, Any], data_bytes: int) -> tuple[Entry, ...]:
    """Return the tensors in the order of their bytes, which they cover without gaps."""
    entries: list[Entry] = []
    try:
        for name, about in header.items():
            if name != "__metadata__":
                start, stop = counts(about["data_offsets"])
                entry = _entry(name, text(about["dtype"]), counts(about["shape"]), start)
                if stop - start != entry.num_bytes:
                    raise CorruptCheckpointError(
                        f"{name}: {stop - start} of {entry.num_bytes} bytes"
                    )
                entries.append(entry)
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise CorruptCheckpointError(f"malformed header: {type(e).__name__}: {brief(e)}") from e
    position = 0
    entries.sort(key=lambda e: (e.byte_offset, e.num_bytes))
    for entry in entries:
        if entry.byte_offset != position:
            raise CorruptCheckpointError(f"{entry.name}: overlaps another tensor, or leaves a gap")
        position += entry.num_bytes
    if position != data_bytes:
        raise CorruptCheckpointError(f"tensors of {position} bytes, {data_bytes} are there")
    return tuple(entries)


def _entry(name: str, dtype: str, shape: tuple[int, ...], byte_offset: int) -> Entry:
    if stored_form(dtype, shape) != (dtype, shape) or len(shape) > MAX_DIMS:
        raise CorruptCheckpointError(f"{name}: a tensor of dtype {dtype} and {len(shape)} dims")
    box = Box.whole(shape)
    return Entry(key=name, name=name, dtype=dtype, shape=shape, box=box, byte_offset=byte_offset)


def _only(file: ModelFile, names: frozenset[str] | None, store: Store) -> ModelFile:
    """Leave out tensors that the index does not place in this file; another file may hold them anew."""
    if names is None:
        return file
    found = {entry.name for entry in file.entries}
    if absent := sorted(names - found):
        raise CorruptCheckpointError(
            f"{store.url}/{file.name}: lacks {absent[0]} ({len(absent)} such tensors), which {INDEX_NAME} "
            "says is in it; the files are of another model, or of two",
            key=absent[0],
        )
    kept = tuple(entry for entry in file.entries if entry.name in names)
    return ModelFile(name=file.name, data_offset=file.data_offset, entries=kept)
