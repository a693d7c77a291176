"""The manifest: what a committed checkpoint consists of.

Invariant: its size grows with tensors + ranks, never with tensors x ranks. One row per tensor names a layout
(a rule), one row per file names bytes and digest; what differs per rank lies in that rank's shard file.
The document ends with a digest of itself, so a torn or changed manifest is never taken for a whole one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from fsdp_ckpt.errors import CheckpointError, CorruptCheckpointError, UnsupportedFormatError
from fsdp_ckpt.manifest.fields import count, counts, shown, text
from fsdp_ckpt.manifest.last_result import LastResult
from fsdp_ckpt.manifest.layout_json import LayoutTable, layouts_from_json
from fsdp_ckpt.manifest.rows import FileRow, TensorRow, shard_name
from fsdp_ckpt.manifest.strict_json import brief, parse_json
from fsdp_ckpt.manifest.tree import (
    Path,
    path_from_json,
    path_name,
    path_to_json,
    refuse_colliding_paths,
    values_from_json,
)
from fsdp_ckpt.manifest.typed_json import Json
from fsdp_ckpt.plan.coverage import check_coverage
from fsdp_ckpt.plan.layouts import ListedLayout

__all__ = ["FORMAT_VERSION", "FileRow", "Manifest", "TensorRow", "shard_name"]

FORMAT_NAME = "fsdp_ckpt"
FORMAT_VERSION = 1
# A million tensors and a million ranks take a fifth of it.
MAX_MANIFEST_BYTES = 2**30
_DIGEST_KEY = b',"digest":"'
# Names that every file system and store takes as they are.
_FILE_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,199}/[A-Za-z0-9][\w.-]{0,199}\.safetensors", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A committed checkpoint.

    Args:
        step: Training step.
        attempt: Id of the save that wrote it.
        world_size: Number of ranks, and of files.
        tensors: One row per tensor.
        files: One row per rank.
        values: Global values, typed JSON by path.
        rank_local: Paths of which every rank has its own value or tensor, in its shard file.
        partial: Paths of which some ranks have their own, in their shard files, and the others nothing.
        inline: Content of tensors of a few bytes that all ranks hold, by name, row-major, little endian: step
            counts, so that no block of another rank's file is read for four bytes. They stand in a shard file
            too.
        varying: Paths that have a global value or tensor, from which some ranks differ: those have their
            own in their shard file.
        generation: Goes up with every rollback.
        created: When the save was planned, ISO 8601, UTC.
        library: Version of this package that wrote it.
    """

    step: int
    attempt: str
    world_size: int
    tensors: tuple[TensorRow, ...]
    files: tuple[FileRow, ...] = ()
    values: Mapping[Path, Json] = field(default_factory=dict)
    rank_local: tuple[Path, ...] = ()
    partial: tuple[Path, ...] = ()
    varying: tuple[Path, ...] = ()
    inline: Mapping[str, bytes] = field(default_factory=dict)
    generation: int = 0
    created: str = ""
    library: str = ""

    @property
    def own_paths(self) -> tuple[Path, ...]:
        """Paths without a global content: each rank that has them has its own."""
        return (*self.rank_local, *self.partial)

    def to_json(self) -> dict[str, Json]:
        """Return the document without its digest."""
        return {
            "format": FORMAT_NAME,
            "version": FORMAT_VERSION,
            "step": self.step,
            "attempt": self.attempt,
            "generation": self.generation,
            "world_size": self.world_size,
            "created": self.created,
            "library": self.library,
            **_tables_to_json(self.tensors),
            "files": [[f.name, f.num_bytes, f.data_offset, f.digest] for f in self.files],
            "values": [[path_to_json(path), value] for path, value in self.values.items()],
            "rank_local": [path_to_json(path) for path in self.rank_local],
            "partial": [path_to_json(path) for path in self.partial],
            "varying": [path_to_json(path) for path in self.varying],
            "inline": {name: data.hex() for name, data in self.inline.items()},
        }

    def to_bytes(self) -> bytes:
        """Return the file's content; ASCII, one line."""
        body = json.dumps(self.to_json(), separators=(",", ":"), allow_nan=False).encode()[:-1]
        return body + _DIGEST_KEY + xxhash.xxh3_64_hexdigest(body).encode() + b'"}'

    @classmethod
    def from_bytes(cls, content: bytes, where: str) -> Manifest:
        """Parse and check a manifest.

        Args:
            content: The whole file.
            where: The file's name, for errors.

        Raises:
            CorruptCheckpointError: Not a whole manifest.
            UnsupportedFormatError: Written by a newer version of the format.
        """
        try:
            document = parse_json(content)
        except CorruptCheckpointError as e:
            raise CorruptCheckpointError(f"{where}: {e}; a torn write?", key=where) from e
        _check_format(document, where)
        body, found, tail = content.rpartition(_DIGEST_KEY)
        if not found or tail != xxhash.xxh3_64_hexdigest(body).encode() + b'"}':
            raise CorruptCheckpointError(f"{where}: the digest does not match; damaged", key=where)
        return cls.from_json(document, where)

    @classmethod
    def from_json(cls, document: Any, where: str) -> Manifest:
        """Parse and check what :meth:`to_json` returned; errors as of :meth:`from_bytes`."""
        _check_format(document, where)
        try:
            return cls._from_document(document)
        except CheckpointError as e:
            raise CorruptCheckpointError(f"{where}: {brief(e)}", key=where) from e
        except (
            KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError,
        ) as e:  # fmt: skip
            raise CorruptCheckpointError(
                f"{where}: malformed manifest ({type(e).__name__}: {brief(e)})", key=where
            ) from e

    @classmethod
    def _from_document(cls, document: Mapping[str, Json]) -> Manifest:
        num_files = len(document["files"])
        layouts = layouts_from_json(document["meshes"], document["layouts"], max_ranks=num_files)
        manifest = cls(
            step=count(document["step"]),
            attempt=text(document["attempt"]),
            generation=count(document["generation"]),
            world_size=count(document["world_size"]),
            created=text(document["created"]),
            library=text(document["library"]),
            tensors=tuple(
                TensorRow(
                    path=path_from_json(path),
                    dtype=text(dtype),
                    shape=counts(shape),
                    layout=layouts[count(layout)],
                    replica=count(replica),
                )
                for path, dtype, shape, layout, replica in document["tensors"]
            ),
            files=tuple(
                FileRow(
                    name=text(name),
                    num_bytes=count(num_bytes),
                    data_offset=count(data_offset),
                    digest=text(digest),
                )
                for name, num_bytes, data_offset, digest in document["files"]
            ),
            values=values_from_json(document["values"]),
            rank_local=tuple(path_from_json(path) for path in document["rank_local"]),
            partial=tuple(path_from_json(path) for path in document["partial"]),
            varying=tuple(path_from_json(path) for path in document["varying"]),
            inline={name: bytes.fromhex(data) for name, data in document["inline"].items()},
        )
        manifest.check()
        return manifest

    def check(self) -> None:
        """Prove that the rows make sense together: files per rank, unique names, full coverage.

        Raises:
            CorruptCheckpointError: They do not.
        """
        if self.world_size < 1 or len(self.files) != self.world_size:
            raise CorruptCheckpointError(f"{len(self.files)} files for {self.world_size} ranks")
        self._check_files()
        paths = [*self.values, *self.own_paths, *(t.path for t in self.tensors)]
        refuse_colliding_paths(paths)
        if len(set(map(path_name, paths))) != len(paths):
            raise CorruptCheckpointError("two entries have the same name")
        if max((row.layout.max_rank for row in self.tensors), default=0) >= self.world_size:
            raise CorruptCheckpointError(
                f"a layout of ranks beyond the {self.world_size} there are"
            )
        # Many rows may share one long list of chunks, which fits one shape.
        proven: dict[tuple[int, int], tuple[int, ...]] = {}
        sizes: dict[str, int] = {}
        for row in self.tensors:
            name, layout = row.name, row.layout
            if type(layout) is not ListedLayout:
                check_coverage(name, row.shape, layout, row.replica)
            elif proven.get((id(layout), row.replica)) != row.shape:
                check_coverage(name, row.shape, layout, row.replica)
                proven[id(layout), row.replica] = row.shape
            sizes[name] = row.num_bytes
        for name, data in self.inline.items():
            if sizes.get(name) != len(data):
                raise CorruptCheckpointError(
                    f"{name}: {len(data)} bytes inline, {sizes.get(name)} expected"
                )

    def _check_files(self) -> None:
        for file in self.files:
            if not _FILE_NAME.fullmatch(file.name) or ".." in file.name:
                raise CorruptCheckpointError(f"file name {file.name[:80]!r} leaves the checkpoint")
            if not 8 < file.data_offset <= file.num_bytes:
                raise CorruptCheckpointError(
                    f"{file.name}: data at {file.data_offset} of {file.num_bytes}"
                )
        if len({file.name for file in self.files}) != len(self.files):
            raise CorruptCheckpointError("two ranks have the same file")


@LastResult
def _tables_to_json(tensors: tuple[TensorRow, ...]) -> dict[str, Json]:
    """Return the fields that all saves of one structure have in common; not to be changed."""
    table = LayoutTable()
    rows = [
        [path_to_json(t.path), t.dtype, list(t.shape), table.add(t.layout), t.replica]
        for t in tensors
    ]
    return {**table.to_json(), "tensors": rows}


def _check_format(document: Any, where: str) -> None:
    if not isinstance(document, dict) or document.get("format") != FORMAT_NAME:
        raise CorruptCheckpointError(f"{where}: not a manifest of fsdp_ckpt", key=where)
    _check_version(document.get("version"), where)


def _check_version(version: Any, where: str) -> None:
    if type(version) is not int or version < 1:
        raise CorruptCheckpointError(f"{where}: format version {shown(version)}", key=where)
    if version > FORMAT_VERSION:
        raise UnsupportedFormatError(
            f"{where}: format version {shown(version)} is newer than {FORMAT_VERSION}, the newest this "
            "fsdp_ckpt reads; upgrade it",
            key=where,
        )
