"""What one rank holds, as it tells the others: the leaves of its state, without their content."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fsdp_ckpt.manifest.layout_json import LayoutTable, layouts_from_json
from fsdp_ckpt.manifest.tree import Path, path_from_json, path_name, path_to_json
from fsdp_ckpt.manifest.typed_json import Json
from fsdp_ckpt.plan.layouts import FlatLayout, ListedLayout, MeshLayout
from fsdp_ckpt.storage.shard_io import digest

__all__ = ["Item", "Summary"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One leaf of the state, as its rank describes it to the others.

    Args:
        kind: ``tensor`` (with ``dtype`` and ``shape``), ``value``, or ``own`` (of this rank by declaration).
        path: Where it stands.
        dtype: Name of the format, for a tensor.
        shape: Global shape, for a tensor.
        layout: Of a sharded tensor; ``None`` for a plain tensor and for a value.
        digest: Of the content of a plain tensor or a value, and of a sharded tensor's part where the mesh
            is not all ranks.
    """

    kind: Literal["tensor", "value", "own"]
    path: Path
    dtype: str = ""
    shape: tuple[int, ...] = ()
    layout: MeshLayout | FlatLayout | None = None
    digest: str = ""

    def with_digest(self, content: str) -> Item:
        """Return this item with the digest of its content."""
        return dataclasses.replace(self, digest=content)


@dataclass(frozen=True)
class Summary:
    """All leaves of one rank's state, by name."""

    items: Mapping[str, Item]

    def to_json(self) -> dict[str, Json]:
        """Return plain data, for the other ranks."""
        table = LayoutTable()
        rows = []
        for item in self.items.values():
            layout = None if item.layout is None else table.add(item.layout)
            row = [
                item.kind,
                path_to_json(item.path),
                item.dtype,
                list(item.shape),
                layout,
                item.digest,
            ]
            rows.append(row)
        return {**table.to_json(), "items": rows}

    @classmethod
    def from_json(cls, encoded: Mapping[str, Any]) -> Summary:
        """Rebuild what :meth:`to_json` described."""
        layouts = layouts_from_json(encoded["meshes"], encoded["layouts"])
        items: dict[str, Item] = {}
        for kind, encoded_path, dtype, shape, index, content in encoded["items"]:
            path = path_from_json(encoded_path)
            layout = None if index is None else layouts[index]
            if isinstance(layout, ListedLayout):
                raise AssertionError("a summary lists no chunks")
            items[path_name(path)] = Item(
                kind=kind, path=path, dtype=dtype, shape=tuple(shape), layout=layout, digest=content
            )
        return cls(items)

    def fingerprint(self) -> str:
        """Return a digest of everything: equal on all ranks, where nothing needs to be talked about."""
        return digest(json.dumps(self.to_json(), separators=(",", ":")).encode())
