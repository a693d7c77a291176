"""Layouts as JSON: each mesh and each layout once, tensors refer to them by position."""

from __future__ import annotations

import math
from typing import Any

from fsdp_ckpt.errors import CorruptCheckpointError
from fsdp_ckpt.manifest.fields import count, counts, text
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

MAX_AXES = 31
# Meshes without a list of ranks take no room in the manifest, and as much memory as there are ranks.
MAX_IMPLICIT_MESHES = 64


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
        max_ranks: Ranks of the largest mesh there can be; shapes alone could ask for any memory.

    Raises:
        CorruptCheckpointError: Not of the schema. Also ``KeyError``, ``TypeError``, ``ValueError`` and
            ``IndexError``, which the manifest's reader maps.
    """
    built: list[Mesh] = []
    implied_ranks = 0
    for encoded in meshes:
        mesh = _mesh_from_json(encoded, max_ranks)
        if "ranks" not in encoded:
            implied_ranks += len(mesh.ranks)
        if implied_ranks > MAX_IMPLICIT_MESHES * max_ranks:
            raise CorruptCheckpointError(f"meshes of {implied_ranks} ranks, {max_ranks} there are")
        built.append(mesh)
    # One object each: what a layout computes once, it keeps.
    known: dict[tuple[int, tuple[str, ...]], Layout] = {}
    return [_layout_from_json(layout, built, known) for layout in layouts]


def _mesh_from_json(encoded: Any, max_ranks: int) -> Mesh:
    shape = counts(encoded["shape"])
    if len(shape) > MAX_AXES:
        raise CorruptCheckpointError(f"a mesh of {len(shape)} axes, at most {MAX_AXES} expected")
    num_ranks = math.prod(shape)
    if not 0 < num_ranks <= max_ranks:
        raise CorruptCheckpointError(f"mesh of shape {shape} for at most {max_ranks} ranks")
    return Mesh(shape, counts(encoded["ranks"])) if "ranks" in encoded else Mesh.whole(shape)


def _layout_from_json(
    encoded: Any, meshes: list[Mesh], known: dict[tuple[int, tuple[str, ...]], Layout]
) -> Layout:
    if "chunks" in encoded:
        return ListedLayout(
            tuple(
                (count(rank), Box(counts(offsets), counts(sizes)))
                for rank, offsets, sizes in encoded["chunks"]
            )
        )
    position = count(encoded["mesh"])
    mesh = meshes[position]
    if "flat" in encoded:
        shard_elements, start = counts(encoded["flat"])
        return FlatLayout(mesh, shard_elements, start)
    key = (position, tuple(text(placement) for placement in encoded["placements"]))
    if key not in known:
        known[key] = MeshLayout(mesh, tuple(map(Placement.parse, key[1])))
    return known[key]
