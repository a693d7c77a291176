"""Plans of other planners: chunks are listed outright, values are encoded without their pickle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from fsdp_ckpt.dcp.contents import Contents
from fsdp_ckpt.dcp.live import CODEC, describe_tensor, dtype_name
from fsdp_ckpt.errors import UnencodableStateError
from fsdp_ckpt.manifest.schema import Manifest, TensorRow
from fsdp_ckpt.manifest.tree import ListIndex, Path
from fsdp_ckpt.manifest.typed_json import Json
from fsdp_ckpt.plan.box import Box
from fsdp_ckpt.plan.image import ImageLayout
from fsdp_ckpt.plan.layouts import ListedLayout

__all__ = ["contents_of_items", "manifest_of_items"]


def contents_of_items(plan: SavePlan, planner: SavePlanner) -> Contents:
    """Return what a rank writes for a plan of write items.

    Raises:
        UnencodableStateError: A value cannot be saved, or the planner gives it as a pickle only.
    """
    mappings = plan.planner_data if isinstance(plan.planner_data, Mapping) else {}
    tensors: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
    chunks: list[tuple[str, str, tuple[int, ...], Box]] = []
    values: dict[Path, Json] = {}
    paths: dict[str, Path] = {}
    for item in plan.items:
        name = item.index.fqn
        path = paths[name] = _typed_path(mappings.get(name), name)
        if item.type == WriteItemType.BYTE_IO:
            values[path] = CODEC.encode(_object_of(planner, item), name)
            continue
        tensor = planner.resolve_data(item)
        if item.tensor_data is None or not isinstance(tensor, torch.Tensor):
            raise UnencodableStateError(f"{name}: the planner resolves no tensor for it", key=name)
        live = describe_tensor(tensor, name, 0, {})
        offsets = tuple(item.tensor_data.chunk.offsets)
        tensors[name, offsets] = live.local
        if tensor.numel():
            chunks.append(
                (name, live.dtype, tuple(item.tensor_data.size), Box(offsets, live.shape))
            )
    return Contents(
        layout=ImageLayout.pack(chunks),
        paths=paths,
        resolve=lambda entry: tensors[entry.name, entry.box.offsets],
        global_values=values,
    )


def _object_of(planner: SavePlanner, item: WriteItem) -> Any:
    """Return the live object: DCP's own planner would hand over its pickle."""
    look_up = getattr(planner, "lookup_object", None)
    if look_up is None:
        raise UnencodableStateError(
            f"{item.index.fqn}: {type(planner).__name__} hands over values as pickles only, which are never "
            "written; give it a lookup_object method, or use ShardSavePlanner",
            key=item.index.fqn,
        )
    return look_up(item.index)


def _typed_path(dcp_path: tuple[Any, ...] | None, name: str) -> Path:
    if dcp_path is None:
        return (name,)
    return tuple(ListIndex(part) if isinstance(part, int) else part for part in dcp_path)


def manifest_of_items(metadata: Metadata, results: list[list[WriteResult]]) -> Manifest:
    """Return the manifest, without its files, of DCP's metadata and what each rank has written."""
    mappings = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    writers: dict[tuple[str, tuple[int, ...]], int] = {}
    for rank, rank_results in enumerate(results):
        for result in rank_results[1:]:
            writers[result.index.fqn, tuple(result.index.offset or ())] = rank
    rows = []
    for name, item in metadata.state_dict_metadata.items():
        if isinstance(item, TensorStorageMetadata):
            chunks = [Box(tuple(c.offsets), tuple(c.sizes)) for c in item.chunks]
            layout = ListedLayout.of((writers[name, box.offsets], box) for box in chunks)
            rows.append(
                TensorRow(
                    path=_typed_path(mappings.get(name), name),
                    dtype=dtype_name(item.properties.dtype),
                    shape=tuple(item.size),
                    layout=layout,
                )
            )
    return Manifest(step=0, attempt="", world_size=len(results), tensors=tuple(rows))
