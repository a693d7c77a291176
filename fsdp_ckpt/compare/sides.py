"""What can be compared: the contents of a checkpoint, or of Hugging Face files, by the same names.

    checkpoint --what, include, exclude--> name → tensor or value, and per rank what is its own
    safetensors files -------------------> name → tensor

Invariant: a name is what consolidation gives a tensor, so that both kinds meet. What a save writes about
itself (attempt, time, library) and what the run knew of itself (``run``) is no content.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from fsdp_ckpt.commit.checkpoint import Checkpoint, Piece, SourceImages
from fsdp_ckpt.commit.locate import locate_checkpoint
from fsdp_ckpt.errors import NotFoundError
from fsdp_ckpt.hf.model_files import ModelFiles, open_model_files
from fsdp_ckpt.hf.selection import ROOTS, Selection, named_rows, short_name
from fsdp_ckpt.manifest.schema import TensorRow
from fsdp_ckpt.manifest.tree import Path, path_name
from fsdp_ckpt.manifest.typed_json import Json
from fsdp_ckpt.plan.box import Box
from fsdp_ckpt.storage.store import Store

__all__ = ["Content", "Side", "Tensor", "Value", "open_source", "side_of"]

RUN = "run"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A whole tensor on one side.

    Args:
        dtype: Name of format version 1.
        shape: Global shape.
        find: Box → the stored pieces that make it up.
    """

    dtype: str
    shape: tuple[int, ...]
    find: Callable[[Box], list[Piece]]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Value:
    """Anything else, as typed JSON."""

    encoded: Json


Content: TypeAlias = Tensor | Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two.

    Args:
        url: Its folder.
        contents: Name → what all ranks have together.
        own: Rank → name → what is that rank's own; reads the header of its file.
        own_names: Names of which ranks have their own.
        world_size: Ranks that saved; 0 for files of a model.
        aliases: Further name of a tied tensor → its name in ``contents``.
        read: Reads pieces with so many reads in flight, verified where there are digests.
    """

    url: str
    contents: Mapping[str, Content]
    own: Callable[[int], Mapping[str, Content]]
    own_names: tuple[str, ...] = ()
    world_size: int = 0
    aliases: Mapping[str, str] = field(default_factory=dict)
    read: Callable[[Iterable[Piece], int | None], SourceImages]

    @property
    def is_model(self) -> bool:
        """Whether it is files of a model, which hold tensors and nothing else."""
        return self.world_size == 0

    def get(self, name: str) -> Content | None:
        """Return what has this name, or is tied to it."""
        return self.contents.get(self.aliases.get(name, name))


def open_source(store: Store) -> Checkpoint | ModelFiles:
    """Open a run's root, a checkpoint's folder, or a folder of safetensors files.

    Raises:
        NotFoundError: It is none of them.
        CorruptCheckpointError: The manifest, or a file's header, is damaged.
        StorageError: The store cannot be read now.
    """
    try:
        return locate_checkpoint(store)[0]
    except NotFoundError as e:
        try:
            return open_model_files(store)
        except NotFoundError:
            raise e from None


def side_of(source: Checkpoint | ModelFiles, selection: Selection) -> Side:
    """Return what is asked for of one side."""
    if isinstance(source, Checkpoint):
        return _side_of_checkpoint(source, selection)
    return Side(
        url=source.store.url,
        contents={
            row.name: Tensor(row.dtype, row.shape, partial(source.pieces, row.name))
            for row in source.rows
            if selection.keeps(row.name)
        },
        own=lambda rank: {},
        read=source.read,
    )


def _side_of_checkpoint(checkpoint: Checkpoint, selection: Selection) -> Side:
    manifest = checkpoint.manifest
    contents: dict[str, Content] = {
        name: _tensor(checkpoint, row) for name, row in named_rows(manifest, selection)
    }
    for path, encoded in manifest.values.items():
        if (name := _name(path, selection)) is not None:
            contents[name] = Value(encoded)
    aliases = {}
    for path, first in manifest.values.items():
        if path[0] == "tied" and isinstance(first, str):
            name = _name(("model", *path[1:]), selection)
            target = _name(("model", first), selection)
            if name is not None and target in contents:
                aliases[name] = target
    varying = (*manifest.own_paths, *manifest.varying)
    names = (_name(path, selection) for path in varying)
    own_names = tuple(name for name in names if name is not None)
    return Side(
        url=checkpoint.store.url,
        contents=contents,
        own=partial(_own, checkpoint, selection) if own_names else lambda rank: {},
        own_names=own_names,
        world_size=manifest.world_size,
        aliases=aliases,
        read=checkpoint.read,
    )


def _tensor(checkpoint: Checkpoint, row: TensorRow) -> Tensor:
    return Tensor(row.dtype, row.shape, partial(checkpoint.pieces, row))


def _own(checkpoint: Checkpoint, selection: Selection, rank: int) -> dict[str, Content]:
    header = checkpoint.header(rank)
    found: dict[str, Content] = {}
    for path, encoded in header.values.items():
        if (name := _name(path, selection)) is not None:
            found[name] = Value(encoded)
    for full_name in header.own:
        name = _name(header.paths[full_name], selection)
        piece = checkpoint.own_piece(rank, full_name)
        if name is not None and piece is not None:
            found[name] = Tensor(piece.entry.dtype, piece.entry.shape, partial(_part, piece))
    return found


def _part(piece: Piece, box: Box) -> list[Piece]:
    return [Piece(piece.rank, piece.entry, box)] if box.num_elements else []


def _name(path: Path, selection: Selection) -> str | None:
    """Return the name under which a path is compared; ``None`` where it is not asked for."""
    root = ROOTS[selection.what]
    if path[: len(root)] != root or len(path) <= len(root) or path[0] == RUN:
        return None
    name = short_name(path, selection.what) if root else path_name(path)
    return name if selection.keeps(name) else None
