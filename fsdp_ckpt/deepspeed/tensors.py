"""Tensors that lie in parts in DeepSpeed's files, read as the sources of shard files are.

    wanted box --row-major--> range of elements --> parts of files --> boxes of them --> pieces

A part is a range of a tensor's row-major elements; ZeRO cuts tensors nowhere else.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fsdp_ckpt.commit.source_images import INLINE, Piece, SourceImages
from fsdp_ckpt.hf.cast import bits_dtype, cast
from fsdp_ckpt.hf.model_files import ModelFile, ModelFiles
from fsdp_ckpt.plan.box import Box, byte_span, overlap
from fsdp_ckpt.plan.dtypes import itemsize
from fsdp_ckpt.plan.flat import flat_range_boxes
from fsdp_ckpt.plan.image import Entry
from fsdp_ckpt.storage.store import Store

__all__ = ["Part", "PartedTensor", "PartedTensors"]


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive elements of a tensor.

    Args:
        low: First of its row-major elements.
        high: One past the last.
        file: Position of the file.
        byte_offset: Where they start in it.
    """

    low: int
    high: int
    file: int
    byte_offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartedTensor:
    """A tensor and where it lies.

    Args:
        stored_dtype: In the files.
        dtype: That it is to become: the same, or a wider one.
        shape: Its shape.
        parts: In order, without gaps; none where ``content`` is there.
        content: Its bytes, where it does not lie in a file.
    """

    stored_dtype: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...] = ()
    content: bytes = b""


@dataclass(frozen=True, slots=True)
class PartedTensors:
    """Tensors by name, as the source of shard files.

    Args:
        store: Folder of the files.
        keys: Of the files, in order.
        tensors: Name → tensor.
    """

    store: Store
    keys: Sequence[str]
    tensors: Mapping[str, PartedTensor]
    _files: ModelFiles = field(init=False)

    def __post_init__(self) -> None:
        # Only as what reads ranges of files: places are the files' own, from their first byte.
        files = [ModelFile(name=key, data_offset=0, entries=()) for key in self.keys]
        object.__setattr__(self, "_files", ModelFiles(self.store, files))

    def pieces(self, name: str, wanted: Box) -> list[Piece]:
        """Return the pieces that together make up the box ``wanted`` of a tensor."""
        tensor = self.tensors[name]
        if not wanted.num_elements:
            return []
        if tensor.content:
            return [Piece(INLINE, _entry(name, tensor, Box.whole(tensor.shape), 0), wanted)]
        low, high = byte_span(wanted, Box.whole(tensor.shape), 1)
        return list(_overlapping(name, tensor, wanted, low, high))

    def read(self, pieces: Iterable[Piece], num_threads: int | None = None) -> SourceImages:
        """Read all pieces.

        Args:
            pieces: What to read.
            num_threads: Reads in flight; by default as many as suit the store.

        Raises:
            NotFoundError: A file has gone.
            StorageError: The store failed, or a file has become shorter.
        """
        stored = [piece for piece in pieces if piece.rank != INLINE]
        return _WidenedImages(self._files.read(stored, num_threads), self.tensors)


def _overlapping(
    name: str, tensor: PartedTensor, wanted: Box, low: int, high: int
) -> Iterator[Piece]:
    size = itemsize(tensor.stored_dtype)
    first = bisect.bisect_right(tensor.parts, low, key=lambda part: part.high)
    for part in tensor.parts[first:]:
        if part.low >= high:
            return
        byte_offset = part.byte_offset
        for box in flat_range_boxes(tensor.shape, part.low, part.high):
            region = overlap(box, wanted)
            if region is not None:
                yield Piece(part.file, _entry(name, tensor, box, byte_offset), region)
            byte_offset += box.num_elements * size


def _entry(name: str, tensor: PartedTensor, box: Box, byte_offset: int) -> Entry:
    return Entry(
        key=name,
        name=name,
        dtype=tensor.stored_dtype,
        shape=tensor.shape,
        box=box,
        byte_offset=byte_offset,
    )


class _WidenedImages(SourceImages):
    """What was read, in the dtypes that it is to become, and what never was in a file.

    Args:
        images: Of the files.
        tensors: Name → tensor.
    """

    def __init__(self, images: SourceImages, tensors: Mapping[str, PartedTensor]) -> None:
        super().__init__({})
        self._images = images
        self._tensors = tensors

    def array(self, piece: Piece) -> np.ndarray:
        """Return the piece's bytes, shape (*region.sizes, itemsize), uint8."""
        tensor = self._tensors[piece.entry.name]
        if piece.rank == INLINE:
            content = memoryview(bytearray(tensor.content))
            return SourceImages({INLINE: (0, content)}).array(piece)
        found = self._images.array(piece)
        if tensor.dtype == tensor.stored_dtype:
            return found
        bits = np.ascontiguousarray(found).view(bits_dtype(tensor.stored_dtype))
        widened, _ = cast(bits, tensor.stored_dtype, tensor.dtype)
        return widened.view(np.uint8)
