"""Which tensors go into which output file, and where they lie in it. Pure arithmetic.

    tensors, in the checkpoint's order --max_shard_bytes--> files --widest dtype first--> byte offsets

Invariant: rows and ``max_shard_bytes`` alone determine every byte but the tensors' content, so a second run
writes the same files. Inside a file tensors lie without gaps, as the safetensors format demands; the widest
dtype comes first, so each is aligned to its own element size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fsdp_ckpt.errors import UnencodableStateError
from fsdp_ckpt.manifest.schema import TensorRow
from fsdp_ckpt.manifest.shard import MAX_HEADER_BYTES
from fsdp_ckpt.manifest.tree import path_name
from fsdp_ckpt.plan.box import Box
from fsdp_ckpt.plan.dtypes import itemsize, stored_form

__all__ = ["OutputFile", "Region", "index_of", "lay_out_files"]

# A cache line; a reader that maps the file gets tensors as aligned as their dtype allows.
ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTensor:
    """One tensor in an output file.

    Args:
        name: In the output.
        row: In the checkpoint.
        byte_offset: Start within the file's data, in bytes.
    """

    name: str
    row: TensorRow
    byte_offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.row.shape) * itemsize(self.row.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A part of one tensor that is contiguous in the output.

    Args:
        row: The tensor.
        box: The part; not empty.
        byte_offset: Start within the file's data, in bytes.
    """

    row: TensorRow
    box: Box
    byte_offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the part."""
        return self.box.num_elements * itemsize(self.row.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFile:
    """One safetensors file.

    Args:
        name: Its key in the output folder.
        tensors: In the order of their bytes.
    """

    name: str
    tensors: tuple[OutputTensor, ...]

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    def header(self) -> bytes:
        """Return everything before the data: length, JSON, spaces up to a multiple of 64 bytes.

        Raises:
            UnencodableStateError: It would be longer than safetensors readers accept.

        Source: https://huggingface.co/docs/safetensors, "Format".
        """
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for tensor in self.tensors:
            entries[tensor.name] = {
                "dtype": tensor.row.dtype,
                "shape": list(tensor.row.shape),
                "data_offsets": [tensor.byte_offset, tensor.byte_offset + tensor.num_bytes],
            }
        text = json.dumps(entries, separators=(",", ":")).encode()
        size = len(text) + -(8 + len(text)) % ALIGNMENT
        if size > MAX_HEADER_BYTES:
            raise UnencodableStateError(
                f"{self.name}: a header of {size} bytes, safetensors allows {MAX_HEADER_BYTES}; "
                "choose smaller files"
            )
        return size.to_bytes(8, "little") + text.ljust(size)

    def windows(self, max_bytes: int) -> Iterator[Sequence[Region]]:
        """Cut the data into consecutive windows of at most ``max_bytes`` (one element at least).

        Yields:
            The regions of a window, in the order of their bytes and without gaps.
        """
        window: list[Region] = []
        free = max_bytes
        for tensor in self.tensors:
            byte_offset = tensor.byte_offset
            for box in _slabs(tensor.row.shape, itemsize(tensor.row.dtype), max_bytes):
                region = Region(row=tensor.row, box=box, byte_offset=byte_offset)
                if window and region.num_bytes > free:
                    yield window
                    window, free = [], max_bytes
                window.append(region)
                free -= region.num_bytes
                byte_offset += region.num_bytes
        if window:
            yield window


def _slabs(shape: tuple[int, ...], num_bytes: int, max_bytes: int) -> Iterator[Box]:
    """Cut a tensor into boxes that are contiguous in row-major order and follow each other.

    Args:
        shape: Of the tensor; one without elements gives no box.
        num_bytes: Bytes per element.
        max_bytes: Of a box.
    """
    total = math.prod(shape)
    if total == 0:
        return
    if total * num_bytes <= max_bytes or not shape:
        yield Box.whole(shape)
        return
    # The outermost dim of which at least one step fits: all dims before it are taken one by one.
    dim = next(
        (d for d in range(len(shape)) if math.prod(shape[d + 1 :]) * num_bytes <= max_bytes),
        len(shape) - 1,
    )
    rest = shape[dim + 1 :]
    run = max(max_bytes // (math.prod(rest) * num_bytes), 1)
    for outer in np.ndindex(shape[:dim]):
        for start in range(0, shape[dim], run):
            offsets = (*outer, start, *(0 for _ in rest))
            yield Box(offsets, (*(1 for _ in outer), min(run, shape[dim] - start), *rest))


def lay_out_files(rows: Iterable[TensorRow], max_shard_bytes: int) -> tuple[OutputFile, ...]:
    """Decide which model tensors go into which file, and where.

    Args:
        rows: Model tensors, in order; the first element of each path is left out of the name.
        max_shard_bytes: Most bytes of tensors in a file; a larger tensor has a file to itself.

    Returns:
        One file ``model.safetensors`` or several ``model-0000i-of-0000n.safetensors``.

    Raises:
        UnencodableStateError: A name or dtype has no place in a safetensors file.

    Source: the greedy rule of ``split_torch_state_dict_into_shards`` in huggingface_hub.
    """
    groups: list[list[TensorRow]] = [[]]
    held = 0
    for row in rows:
        num_bytes = math.prod(row.shape) * itemsize(row.dtype)
        if groups[-1] and held + num_bytes > max_shard_bytes:
            groups.append([])
            held = 0
        groups[-1].append(row)
        held += num_bytes
    if len(groups) == 1:
        return (_pack("model.safetensors", groups[0]),)
    return tuple(
        _pack(f"model-{i:05d}-of-{len(groups):05d}.safetensors", group)
        for i, group in enumerate(groups, 1)
    )


def _pack(file_name: str, rows: Iterable[TensorRow]) -> OutputFile:
    tensors: list[OutputTensor] = []
    byte_offset = 0
    for row in sorted(rows, key=lambda row: -itemsize(row.dtype)):
        name = path_name(row.path[1:])
        if name == "__metadata__":
            raise UnencodableStateError(
                f"{name}: safetensors keeps this name for itself; rename it", key=name
            )
        if stored_form(row.dtype, row.shape) != (row.dtype, row.shape):
            raise UnencodableStateError(
                f"{name}: safetensors has no dtype {row.dtype}; cast the tensor before it is saved",
                key=name,
            )
        tensors.append(OutputTensor(name=name, row=row, byte_offset=byte_offset))
        byte_offset += tensors[-1].num_bytes
    return OutputFile(name=file_name, tensors=tuple(tensors))


def index_of(files: Sequence[OutputFile]) -> bytes | None:
    """Return ``model.safetensors.index.json``, or ``None`` for a single file, which needs none."""
    if len(files) == 1:
        return None
    index = {
        "metadata": {"total_size": sum(file.data_bytes for file in files)},
        "weight_map": {tensor.name: file.name for file in files for tensor in file.tensors},
    }
    return json.dumps(index, indent=2, sort_keys=True).encode() + b"\n"
