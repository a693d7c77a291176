"""Which tensors go into which output file, and where they lie in it. Pure arithmetic.

    tensors, in order --max_shard_bytes--> files --widest dtype first--> byte offsets

Invariant: tensors and ``max_shard_bytes`` alone determine every byte but the tensors' content, so a second
run writes the same files. Inside a file tensors lie without gaps, as the safetensors format demands; the
widest dtype comes first, so each is aligned to its own element size.
"""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fsdp_ckpt.errors import UnencodableStateError
from fsdp_ckpt.manifest.shard import MAX_HEADER_BYTES
from fsdp_ckpt.plan.box import Box
from fsdp_ckpt.plan.dtypes import itemsize, stored_form
from fsdp_ckpt.plan.flat import flat_range_boxes

__all__ = ["OutputFile", "OutputTensor", "Region", "index_of", "lay_out_files"]

# A cache line; a reader that maps the file gets tensors as aligned as their dtype allows.
ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTensor:
    """One tensor as it comes out.

    Args:
        name: In the output.
        dtype: In the output; a name of format version 1.
        shape: Of the whole tensor.
        byte_offset: Start within its file's data, in bytes; set by :func:`lay_out_files`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    byte_offset: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A part of one tensor that is contiguous in the output.

    Args:
        tensor: Whose.
        box: The part; not empty.
        byte_offset: Start within the file's data, in bytes.
    """

    tensor: OutputTensor
    box: Box
    byte_offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the part."""
        return self.box.num_elements * itemsize(self.tensor.dtype)


@dataclass(frozen=True, kw_only=True)
class OutputFile:
    """One safetensors file.

    Args:
        name: Its key in the output folder.
        tensors: In the order of their bytes.
    """

    name: str
    tensors: tuple[OutputTensor, ...]

    @cached_property
    def data_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + self.data_bytes

    @cached_property
    def header(self) -> bytes:
        """Everything before the data: length, JSON, spaces up to a multiple of 64 bytes.

        Raises:
            UnencodableStateError: It would be longer than safetensors readers accept.

        Source: https://huggingface.co/docs/safetensors, "Format".
        """
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for tensor in self.tensors:
            entries[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
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

    @cached_property
    def _starts(self) -> list[int]:
        return [tensor.byte_offset for tensor in self.tensors]

    def regions(self, start: int, stop: int) -> Iterator[Region]:
        """Cut a part of the data into regions, in the order of their bytes and without gaps.

        Args:
            start: First byte of the data; on an element.
            stop: One past the last byte, at most ``data_bytes``; on an element.
        """
        # Tensors without elements share their start with the next one.
        at = max(bisect.bisect_right(self._starts, start) - 1, 0)
        while at < len(self.tensors) and self.tensors[at].byte_offset < stop:
            tensor = self.tensors[at]
            size = itemsize(tensor.dtype)
            low = max(start - tensor.byte_offset, 0)
            high = min(stop - tensor.byte_offset, tensor.num_bytes)
            byte_offset = tensor.byte_offset + low
            for box in flat_range_boxes(tensor.shape, low // size, high // size):
                yield Region(tensor=tensor, box=box, byte_offset=byte_offset)
                byte_offset += box.num_elements * size
            at += 1


def lay_out_files(
    tensors: Iterable[OutputTensor], max_shard_bytes: int, stem: str = "model"
) -> tuple[OutputFile, ...]:
    """Decide which tensors go into which file, and where.

    Args:
        tensors: In order, each name once; byte offsets are ignored.
        max_shard_bytes: Most bytes of tensors in a file; a larger tensor has a file to itself.
        stem: With which the files' names begin.

    Returns:
        One file ``model.safetensors`` or several ``model-0000i-of-0000n.safetensors``.

    Raises:
        UnencodableStateError: A name or dtype has no place in a safetensors file.

    Source: the greedy rule of ``split_torch_state_dict_into_shards`` in huggingface_hub.
    """
    groups: list[list[OutputTensor]] = [[]]
    held = 0
    for tensor in tensors:
        _check(tensor)
        if groups[-1] and held + tensor.num_bytes > max_shard_bytes:
            groups.append([])
            held = 0
        groups[-1].append(tensor)
        held += tensor.num_bytes
    if len(groups) == 1:
        return (_pack(f"{stem}.safetensors", groups[0]),)
    return tuple(
        _pack(f"{stem}-{i:05d}-of-{len(groups):05d}.safetensors", group)
        for i, group in enumerate(groups, 1)
    )


def _check(tensor: OutputTensor) -> None:
    if tensor.name == "__metadata__":
        raise UnencodableStateError(
            f"{tensor.name}: safetensors keeps this name for itself; rename it", key=tensor.name
        )
    if stored_form(tensor.dtype, tensor.shape) != (tensor.dtype, tensor.shape):
        raise UnencodableStateError(
            f"{tensor.name}: safetensors has no dtype {tensor.dtype}; leave the tensor out, or cast it "
            "before it is saved",
            key=tensor.name,
        )


def _pack(file_name: str, tensors: Iterable[OutputTensor]) -> OutputFile:
    placed: list[OutputTensor] = []
    byte_offset = 0
    for tensor in sorted(tensors, key=lambda tensor: -itemsize(tensor.dtype)):
        placed.append(replace(tensor, byte_offset=byte_offset))
        byte_offset += tensor.num_bytes
    return OutputFile(name=file_name, tensors=tuple(placed))


def index_of(files: Sequence[OutputFile]) -> bytes | None:
    """Return the index of several files, or ``None`` for a single one, which needs none."""
    if len(files) == 1:
        return None
    index = {
        "metadata": {"total_size": sum(file.data_bytes for file in files)},
        "weight_map": {tensor.name: file.name for file in files for tensor in file.tensors},
    }
    return json.dumps(index, indent=2, sort_keys=True).encode() + b"\n"
