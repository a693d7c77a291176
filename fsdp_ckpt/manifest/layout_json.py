"""Layouts as JSON: each mesh and each layout once, tensors refer to them by position."""

from __future__ import annotations

import math
from typing import Any

from fsdp_ckpt.errors import CorruptCheckpointError
from fsdp_ckpt.manifest.fields import count, counts
from fsdp_ckpt.manifest.typed_json import Json
from fsdp_ckpt.plan.box import Box
from fsdp_ckpt.plan.layouts import (
    FlatLayout,
    Layout,
    ListedLayout,
    Mesh,
    MeshLayout,
    Placement,
)

__all__ = ["LayoutTable", "layouts_from_json"]


class LayoutTable:
    """Collects the distinct meshes and layouts of a manifest."""

    def __init__(self) -> None:
        self._meshes: dict[Mesh, int] = {}
        self._layouts: dict[Layout, int] = {}

    def add(self, layout: Layout) -> int:
        """Return the layout's position, adding it where it is new."""
        if layout not in self._layouts:
            if not isinstance(layout, ListedLayout):
                self._meshes.setdefault(layout.mesh, len(self._meshes))
            self._layouts[layout] = len(self._layouts)
        return self._layouts[layout]

    def to_json(self) -> dict[str, Json]:
        """Return the fields ``meshes`` and ``layouts``."""
        return {
            "meshes": [_mesh_to_json(mesh) for mesh in self._meshes],
            "layouts": [self._layout_to_json(layout) for layout in self._layouts],
        }

    def _layout_to_json(self, layout: Layout) -> Json:
        if isinstance(layout, ListedLayout):
            chunks = [[rank, list(box.offsets), list(box.sizes)] for rank, box in layout.listed]
            return {"chunks": chunks}
        if isinstance(layout, FlatLayout):
            flat = [layout.shard_elements, layout.start]
            return {"mesh": self._meshes[layout.mesh], "flat": flat}
        return {
            "mesh": self._meshes[layout.mesh],
            "placements": [str(placement) for placement in layout.placements],
        }


def _mesh_to_json(mesh: Mesh) -> Json:
    if mesh.ranks == tuple(range(len(mesh.ranks))):
        return {"shape": list(mesh.shape)}
    return {"shape": list(mesh.shape), "ranks": list(mesh.ranks)}


def layouts_from_json(meshes: Json, layouts: Json, max_ranks: int = 2**24) -> list[Layout]:
    """Build the layouts that :class:`LayoutTable` wrote.

    Args:
        meshes: Field ``meshes``.
        layouts: Field ``layouts``.
        max_ranks: Ranks of the largest mesh there can be; a shape alone could ask for any memory.

    Raises:
        CorruptCheckpointError: Not of the schema. Also ``KeyError``, ``TypeError``, ``ValueError`` and
            ``IndexError``, which the manifest's reader maps.
    """
    built = [_mesh_from_json(mesh, max_ranks) for mesh in meshes]
    return [_layout_from_json(layout, built) for layout in layouts]


def _mesh_from_json(encoded: Any, max_ranks: int) -> Mesh:
    shape = counts(encoded["shape"])
    num_ranks = math.prod(shape)
    if not 0 < num_ranks <= max_ranks:
        raise CorruptCheckpointError(f"mesh of shape {shape} for at most {max_ranks} ranks")
    return Mesh(shape, counts(encoded["ranks"])) if "ranks" in encoded else Mesh.whole(shape)


def _layout_from_json(encoded: Any, meshes: list[Mesh]) -> Layout:
    if "chunks" in encoded:
        return ListedLayout(
            tuple(
                (count(rank), Box(counts(offsets), counts(sizes)))
                for rank, offsets, sizes in encoded["chunks"]
            )
        )
    mesh = meshes[count(encoded["mesh"])]
    if "flat" in encoded:
        shard_elements, start = counts(encoded["flat"])
        return FlatLayout(mesh, shard_elements, start)
    return MeshLayout(mesh, tuple(Placement.parse(text) for text in encoded["placements"]))
