"""A manifest from what each shard file says about its own entries, where no file holds a spare of it.

DCP's own planners write none. Every chunk is listed then, with the rank whose file has it; what is lost are
tensors without elements, which stand in no file, and what a save writes about itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fsdp_ckpt.errors import CorruptCheckpointError
from fsdp_ckpt.manifest.schema import FileRow, Manifest, TensorRow
from fsdp_ckpt.manifest.shard import ShardHeader
from fsdp_ckpt.manifest.tree import Path
from fsdp_ckpt.manifest.typed_json import Json
from fsdp_ckpt.plan.box import Box
from fsdp_ckpt.plan.image import Entry
from fsdp_ckpt.plan.layouts import ListedLayout

__all__ = ["manifest_of_headers"]


def manifest_of_headers(
    headers: Sequence[ShardHeader], files: Sequence[FileRow], where: str
) -> Manifest:
    """Rebuild a manifest.

    Args:
        headers: Of all ranks, in rank order; of one save.
        files: Their rows.
        where: The attempt's folder, for errors.

    Raises:
        CorruptCheckpointError: The entries do not cover every tensor, or contradict each other.
    """
    held: dict[Path, list[tuple[int, Entry]]] = {}
    values: dict[Path, Json] = {}
    own: Counter[Path] = Counter()
    for header in headers:
        values.update(header.shared)
        own.update((*header.values, *(header.paths[name] for name in header.own)))
        for entry in header.layout.entries:
            if entry.name not in header.own:
                held.setdefault(header.paths[entry.name], []).append((header.rank, entry))
    shared = {*held, *values}
    apart = [path for path in own if path not in shared]
    manifest = Manifest(
        step=headers[0].step,
        attempt=headers[0].attempt,
        world_size=len(headers),
        tensors=tuple(_row(path, found, where) for path, found in held.items()),
        files=tuple(files),
        values=values,
        rank_local=tuple(path for path in apart if own[path] == len(headers)),
        partial=tuple(path for path in apart if own[path] < len(headers)),
        varying=tuple(path for path in own if path in shared),
    )
    # As it will be read: what does not cover a tensor is refused.
    return Manifest.from_json(manifest.to_json(), where)


def _row(path: Path, found: Sequence[tuple[int, Entry]], where: str) -> TensorRow:
    kinds = {(entry.dtype, entry.shape) for _, entry in found}
    if len(kinds) != 1:
        name = found[0][1].name
        raise CorruptCheckpointError(f"{where}: {name} has {len(kinds)} dtypes or shapes", key=name)
    ((dtype, shape),) = kinds
    # Replicas may have been written more than once.
    chunks: dict[Box, int] = {}
    for rank, entry in found:
        chunks.setdefault(entry.box, rank)
    layout = ListedLayout.of((rank, box) for box, rank in chunks.items())
    return TensorRow(path=path, dtype=dtype, shape=shape, layout=layout)
