"""Tensors of the state, put together from what segments and files say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fsdp_ckpt.deepspeed.contents import Contents
from fsdp_ckpt.deepspeed.partitions import Segment
from fsdp_ckpt.deepspeed.tensors import Part, PartedTensor
from fsdp_ckpt.deepspeed.unpickler import StoredTensor
from fsdp_ckpt.errors import CorruptCheckpointError
from fsdp_ckpt.plan.dtypes import itemsize

__all__ = ["Flats", "from_flats", "from_fragments", "whole"]

# (rank, flat vector) → where it lies: the masters, or one key of the optimizer's state.
Flats = Mapping[tuple[int, int], StoredTensor]


def from_flats(
    contents: Contents,
    name: str,
    shape: tuple[int, ...],
    segments: Sequence[Segment],
    flats: Flats,
) -> PartedTensor:
    """Return a tensor that lies in flat vectors as a parameter's master does.

    Raises:
        CorruptCheckpointError: A vector is missing, too short or of another dtype.
    """
    parts = []
    dtype = next(iter(flats.values())).dtype
    for segment in segments:
        flat = flats.get((segment.rank, segment.flat))
        end = segment.start + segment.high - segment.low
        if flat is None or not flat.is_row_major or flat.dtype != dtype or flat.num_elements < end:
            file = contents.optimizer[segment.rank]
            raise CorruptCheckpointError(
                f"{file.where}: lacks a part of {name}; the file is of another checkpoint, copy the tag's "
                "folder anew",
                rank=segment.rank,
                key=name,
            )
        byte_offset = flat.byte_offset + segment.start * itemsize(dtype)
        file_position = contents.position(segment.rank)
        parts.append(Part(segment.low, segment.high, file_position, byte_offset))
    return PartedTensor(stored_dtype=dtype, dtype=dtype, shape=shape, parts=tuple(parts))


def from_fragments(contents: Contents, name: str, shape: tuple[int, ...]) -> PartedTensor:
    """Return a frozen parameter: in stage 3 every model file has a range, in stage 2 the only one has all.

    Raises:
        CorruptCheckpointError: A fragment is missing, too short or not row-major.
    """
    num_elements = math.prod(shape)
    length = -(-num_elements // len(contents.model))
    parts, dtypes = [], []
    for i, file in enumerate(contents.model):
        fragment = file.fragments.get(name)
        low = min(i * length, num_elements)
        high = min(low + length, num_elements)
        if fragment is None or not fragment.is_row_major or fragment.num_elements < high - low:
            raise CorruptCheckpointError(
                f"{contents.store.url}/{file.key}: lacks a part of the frozen parameter {name}, or it is not "
                "row-major; copy the tag's folder anew",
                key=name,
            )
        dtypes.append(fragment.dtype)
        if low < high:
            parts.append(Part(low, high, i, fragment.byte_offset))
    return PartedTensor(stored_dtype=dtypes[0], dtype=dtypes[0], shape=shape, parts=tuple(parts))


def whole(contents: Contents, name: str, tensor: StoredTensor) -> PartedTensor:
    """Return a tensor that lies whole in the first model file.

    Raises:
        CorruptCheckpointError: It is not row-major.
    """
    if not tensor.is_row_major:
        raise CorruptCheckpointError(
            f"{contents.store.url}/{contents.model[0].key}: {name} is not row-major; make it contiguous "
            "before it is saved",
            key=name,
        )
    parts = (Part(0, tensor.num_elements, 0, tensor.byte_offset),) if tensor.num_elements else ()
    return PartedTensor(
        stored_dtype=tensor.dtype, dtype=tensor.dtype, shape=tensor.shape, parts=parts
    )
