"""A live tensor in the format's terms: dtype name, layout, and the chunk this rank holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fsdp_ckpt.errors import UnencodableStateError
from fsdp_ckpt.manifest.typed_json import Codec, Extension, Json
from fsdp_ckpt.plan.box import Box
from fsdp_ckpt.plan.layouts import FlatLayout, Mesh, MeshLayout, Placement
from fsdp_ckpt.state.local_shards import LocalShards

__all__ = [
    "CODEC",
    "EXTENSIONS",
    "LiveTensor",
    "describe_tensor",
    "dtype_name",
    "plain_tensor",
    "torch_dtype",
]

_NAMES: dict[torch.dtype, str] = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32",
    torch.int64: "I64", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64",
    torch.complex32: "C32", torch.complex64: "C64", torch.complex128: "C128",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip
# Newer than the oldest torch supported.
for _attribute, _name in (("float8_e8m0fnu", "F8_E8M0"), ("float4_e2m1fn_x2", "F4_E2M1_X2")):
    if hasattr(torch, _attribute):
        _NAMES[getattr(torch, _attribute)] = _name
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the format's name of a torch dtype.

    Raises:
        UnencodableStateError: The format has none.
    """
    name = _NAMES.get(dtype)
    if name is None:
        raise UnencodableStateError(f"tensors of dtype {dtype} cannot be saved")
    return name


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a dtype name of the format."""
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise UnencodableStateError(f"dtype {name} is not known to torch {torch.__version__}")
    return dtype


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """One tensor of the live state, seen from this rank.

    Args:
        dtype: Name of the format.
        shape: Global shape.
        layout: How ranks hold it; ``None`` for a plain tensor, of which every rank holds all.
        parts: (box, its elements of shape ``box.sizes``) that this rank holds, each sharing memory with the
            live tensor; boxes may be empty, and there are none outside the tensor's mesh.
    """

    dtype: str
    shape: tuple[int, ...]
    layout: MeshLayout | FlatLayout | None
    parts: tuple[tuple[Box, torch.Tensor], ...]

    @property
    def local(self) -> torch.Tensor:
        """The one part of a tensor that has one."""
        ((_, local),) = self.parts
        return local


def describe_tensor(
    tensor: torch.Tensor | LocalShards, name: str, rank: int, layouts: dict[Any, MeshLayout]
) -> LiveTensor:
    """Describe a live tensor.

    Args:
        tensor: A plain strided tensor, a DTensor, or local shards; on any device.
        name: For the error.
        rank: This rank.
        layouts: Those seen so far; tensors sharded alike share one object.

    Raises:
        UnencodableStateError: Another kind of tensor, or partial sums.
    """
    shape = tuple(tensor.shape)
    try:
        dtype = dtype_name(tensor.dtype)
    except UnencodableStateError as e:
        raise UnencodableStateError(f"{name}: {e}", key=name) from e
    if isinstance(tensor, LocalShards):
        return LiveTensor(dtype, shape, tensor.layout, tuple(tensor.parts()))
    if isinstance(tensor, DTensor):
        sharding = (id(tensor.device_mesh), tensor.placements, tensor.ndim)
        layout = layouts.get(sharding)
        if layout is None:
            layout = layouts[sharding] = _mesh_layout(tensor, name)
        # Shares memory with the live tensor.
        box = layout.box_of(shape, rank)
        if box is None:
            return LiveTensor(dtype, shape, layout, ())
        local = plain_tensor(tensor.to_local().detach(), name)
        if tuple(local.shape) != box.sizes:
            raise UnencodableStateError(
                f"{name}: rank {rank} holds {list(local.shape)} of a tensor of {list(shape)}, where its "
                f"placements {tensor.placements} give {list(box.sizes)}; shard it as distribute_tensor does",
                key=name,
            )
        return LiveTensor(dtype, shape, layout, ((box, local),))
    return LiveTensor(
        dtype, shape, None, ((Box.whole(shape), plain_tensor(tensor.detach(), name)),)
    )


def plain_tensor(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return ``tensor`` when its bytes are there; refuse what has no bytes of its own to store."""
    if hasattr(tensor, "wait"):  # AsyncCollectiveTensor
        tensor = tensor.wait()
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "a meta tensor" if tensor.is_meta else f"a {tensor.layout} tensor"
        raise UnencodableStateError(
            f"{name}: {kind} cannot be saved; materialise it first", key=name
        )
    if hasattr(tensor, "__tensor_flatten__"):
        raise UnencodableStateError(
            f"{name}: a {type(tensor).__name__} cannot be saved; save the tensors it wraps",
            key=name,
        )
    return tensor


def _mesh_layout(tensor: DTensor, name: str) -> MeshLayout:
    placements: list[Placement] = []
    for placement in tensor.placements:
        if isinstance(placement, Replicate):
            placements.append(Placement())
        elif isinstance(placement, _StridedShard):
            placements.append(
                Placement(placement.dim % max(tensor.ndim, 1), int(placement.split_factor))
            )
        elif isinstance(placement, Shard):
            placements.append(Placement(placement.dim % max(tensor.ndim, 1)))
        else:
            raise UnencodableStateError(f"{name}: placement {placement} cannot be saved", key=name)
    ranks = tensor.device_mesh.mesh
    mesh = Mesh(tuple(ranks.shape), tuple(ranks.flatten().tolist()))
    return MeshLayout(mesh, tuple(placements))


def _by_name(kind: type, tag: str, known: Mapping[str, Any]) -> Extension:
    def encode(value: Any, key: str) -> dict[str, Json]:
        return {"v": str(value)}

    return Extension(
        tag=tag,
        matches=lambda value: isinstance(value, kind),
        encode=encode,
        decode=lambda fields: known[fields["v"]],
    )


_ALL_DTYPES = {str(v): v for v in vars(torch).values() if isinstance(v, torch.dtype)}
_ALL_LAYOUTS = {str(v): v for v in vars(torch).values() if isinstance(v, torch.layout)}
_ALL_FORMATS = {str(v): v for v in vars(torch).values() if isinstance(v, torch.memory_format)}

EXTENSIONS = (
    _by_name(torch.dtype, "torch.dtype", _ALL_DTYPES),
    _by_name(torch.layout, "torch.layout", _ALL_LAYOUTS),
    _by_name(torch.memory_format, "torch.memory_format", _ALL_FORMATS),
    Extension(
        tag="torch.device",
        matches=lambda value: isinstance(value, torch.device),
        encode=lambda value, key: {"v": str(value)},
        decode=lambda fields: torch.device(fields["v"]),
    ),
    Extension(
        tag="torch.Size",
        matches=lambda value: isinstance(value, torch.Size),
        encode=lambda value, key: {"v": list(value)},
        decode=lambda fields: torch.Size(fields["v"]),
    ),
)
CODEC = Codec(EXTENSIONS)
