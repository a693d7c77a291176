"""Rows of the manifest: one per tensor, one per shard file."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from fsdp_ckpt.manifest.tree import Path, path_name
from fsdp_ckpt.plan.box import Box
from fsdp_ckpt.plan.dtypes import itemsize
from fsdp_ckpt.plan.layouts import Chunks, Layout, MeshLayout

__all__ = ["FileRow", "TensorRow", "shard_name"]

INLINE_BYTES = 64


def shard_name(attempt: str, rank: int, world_size: int) -> str:
    """Return a shard file's key, relative to the checkpoint."""
    return f"{attempt}/rank-{rank:05d}-of-{world_size:05d}.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow:
    """One tensor.

    Args:
        path: Where it stands in the state.
        dtype: Name of format version 1.
        shape: Global shape.
        layout: Rule that gives every rank's chunk.
        replica: Which of the layout's replicas was written.

    Attributes:
        name: The path joined by dots; asked for so often that it is kept.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    layout: Layout
    replica: int = 0
    name: str = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", path_name(self.path))

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * itemsize(self.dtype)

    @property
    def is_inline(self) -> bool:
        """Whether the manifest holds its content too: a few bytes, the same on all ranks."""
        layout = self.layout
        return (
            isinstance(layout, MeshLayout)
            and layout.num_replicas == len(layout.ranks)
            and 0 in layout.mesh.positions
            and 0 < self.num_bytes <= INLINE_BYTES
        )

    def overlapping(self, wanted: Box) -> list[tuple[int, Box]]:
        """Return (rank, chunk) for every stored chunk that shares an element with ``wanted``."""
        return self.layout.overlapping(self.shape, self.replica, wanted)

    @property
    def chunks(self) -> Chunks:
        """Every non-empty chunk and the rank whose file holds it."""
        return self.layout.chunks(self.shape, self.replica)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRow:
    """One shard file; its position among the rows is its rank.

    Args:
        name: Key relative to the checkpoint.
        num_bytes: Size of the whole file.
        data_offset: Where the header ends and the data starts, in bytes.
        digest: xxh3_64 of the header's bytes, 16 hex digits; the header holds the data's digests.
    """

    name: str
    num_bytes: int
    data_offset: int
    digest: str
