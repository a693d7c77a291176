"""A manifest as DCP's ``Metadata``, expanded only where someone looks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from fsdp_ckpt.dcp.live import torch_dtype
from fsdp_ckpt.manifest.schema import Manifest, TensorRow
from fsdp_ckpt.manifest.tree import ListIndex, Path, TupleIndex, path_name

__all__ = ["ShardedMetadata", "to_dcp_metadata"]


@dataclass
class ShardedMetadata(Metadata):
    """DCP's metadata, and the manifest that it shows.

    Args:
        manifest: Of the checkpoint; its file rows are empty while it is being saved.
    """

    manifest: Manifest | None = None


class _Items(Mapping[str, STORAGE_TYPES]):
    """``state_dict_metadata``: name → metadata, each built at its first look-up."""

    def __init__(self, manifest: Manifest) -> None:
        self._rows = {row.name: row for row in manifest.tensors}
        self._values = {path_name(path) for path in (*manifest.values, *manifest.own_paths)}
        self._built: dict[str, STORAGE_TYPES] = {}

    def __getitem__(self, name: str) -> STORAGE_TYPES:
        if name not in self._built:
            if name in self._rows:
                self._built[name] = _expand(self._rows[name])
            elif name in self._values:
                self._built[name] = BytesStorageMetadata()
            else:
                raise KeyError(name)
        return self._built[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._rows
        yield from self._values

    def __len__(self) -> int:
        return len(self._rows) + len(self._values)


def to_dcp_metadata(manifest: Manifest) -> ShardedMetadata:
    """Show a manifest as DCP's metadata; ``planner_data`` maps names to paths, as DCP's planners do."""
    paths = (*(row.path for row in manifest.tensors), *manifest.values, *manifest.own_paths)
    return ShardedMetadata(
        # A Mapping serves wherever DCP reads it; its annotation says dict.
        state_dict_metadata=_Items(manifest),  # type: ignore[arg-type]
        planner_data={path_name(path): _dcp_path(path) for path in paths},
        manifest=manifest,
    )


def _expand(row: TensorRow) -> TensorStorageMetadata:
    chunks = row.chunks
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=torch_dtype(row.dtype)),
        size=torch.Size(row.shape),
        chunks=[
            ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
            for offsets, sizes in zip(chunks.offsets.tolist(), chunks.sizes.tolist(), strict=True)
        ],
    )


def _dcp_path(path: Path) -> tuple[Any, ...]:
    # DCP writes dict keys as str; its ints are list positions.
    return tuple(
        int(part) if isinstance(part, ListIndex | TupleIndex) else str(part) for part in path
    )
