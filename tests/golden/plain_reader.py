"""A reader of checkpoints that is written after docs/format.md, section by section, and nothing else.

It shares no code with the package. Where the two differ, one of them or the page is wrong.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

__all__ = ["flat_boxes", "read_tensors"]

ITEMSIZE = {"I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "C32": 4}
ITEMSIZE |= {"I64": 8, "U64": 8, "F64": 8, "C64": 8, "C128": 16}  # all others: 1

Tensor = tuple[str, tuple[int, ...], bytes]  # dtype, shape, bytes
Box = tuple[list[int], list[int]]  # offsets, sizes


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return name -> dtype, shape and bytes of every global tensor; check every digest."""
    content = (folder / "manifest.json").read_bytes()
    body, _, tail = content.rpartition(b',"digest":"')
    assert tail == f'{xxhash.xxh3_64_hexdigest(body)}"}}'.encode()
    document = json.loads(content)
    assert (document["format"], document["version"]) == ("fsdp_ckpt", 1)
    shards = [read_shard(folder, *row) for row in document["files"]]
    found = {}
    for path, dtype, shape, layout, replica in document["tensors"]:
        name, width = name_of(path), ITEMSIZE.get(dtype, 1)
        whole = np.zeros((*shape, width), np.uint8)
        held = np.zeros(shape, int)
        for rank, (offsets, sizes) in chunks_of(document, layout, shape, replica):
            region = tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))
            data = np.frombuffer(shards[rank][name, tuple(offsets)], np.uint8)
            whole[region] = data.reshape(*sizes, width)
            held[region] += 1
        assert (held == 1).all(), name
        found[name] = (dtype, tuple(shape), whole.tobytes())
    return found


def name_of(path: list[Any]) -> str:
    """Join a path by dots."""
    return ".".join(str(part[0] if isinstance(part, list) else part) for part in path)


def read_shard(
    folder: Path, name: str, num_bytes: int, data_offset: int, digest: str
) -> dict[tuple[str, tuple[int, ...]], bytes]:
    """Return (tensor's name, offsets) -> bytes of the chunk, without what is the rank's own."""
    content = (folder / name).read_bytes()
    assert len(content) == num_bytes
    assert xxhash.xxh3_64_hexdigest(content[:data_offset]) == digest
    assert int.from_bytes(content[:8], "little") == data_offset - 8
    header = json.loads(content[8:data_offset])
    about = json.loads(header["__metadata__"]["fsdp_ckpt"])
    data, digests = content[data_offset:], about["digests"]
    size = digests["block_bytes"]
    blocks = [data[i : i + size] for i in range(0, len(data), size)]
    assert "".join(map(xxhash.xxh3_64_hexdigest, blocks)) == digests["blocks"]
    chunks = {}
    for key, (path, _, _, offsets, *flags) in about["entries"].items():
        start, stop = header[key]["data_offsets"]
        if "own" not in flags:
            chunks[name_of(path), tuple(offsets)] = data[start:stop]
    return chunks


def chunks_of(
    document: dict[str, Any], layout: int, shape: list[int], replica: int
) -> list[tuple[int, Box]]:
    """Return (rank, chunk) for every chunk that is stored."""
    rule = document["layouts"][layout]
    if "chunks" in rule:
        return [(rank, (offsets, sizes)) for rank, offsets, sizes in rule["chunks"]]
    mesh = document["meshes"][rule["mesh"]]
    ranks = mesh.get("ranks", range(math.prod(mesh["shape"])))
    found = []
    for rank, place in zip(ranks, np.ndindex(*mesh["shape"]), strict=True):
        if "flat" in rule:
            shard_elements, start = rule["flat"]
            low = max(place[1] * shard_elements - start, 0)
            high = min((place[1] + 1) * shard_elements - start, math.prod(shape))
            held_replica, boxes = place[0], flat_boxes(shape, low, high)
        else:
            held_replica = replica_at(mesh["shape"], rule["placements"], place)
            boxes = [mesh_box(mesh["shape"], rule["placements"], shape, place)]
        found += [(rank, box) for box in boxes if held_replica == replica and 0 not in box[1]]
    return found


def replica_at(mesh_shape: list[int], placements: list[str], place: tuple[int, ...]) -> int:
    """Count the position on the ``R`` axes in row-major order."""
    replica = 0
    for axis, placement in enumerate(placements):
        if placement == "R":
            replica = replica * mesh_shape[axis] + place[axis]
    return replica


def mesh_box(
    mesh_shape: list[int], placements: list[str], shape: list[int], place: tuple[int, ...]
) -> Box:
    """Cut a shape for one place in the mesh."""
    dims = [None if p == "R" else int(p[1:].partition("/")[0]) for p in placements]
    order: list[int] = []
    for axis in reversed(range(len(placements))):
        if dims[axis] is None:
            continue
        wanted = int(placements[axis].partition("/")[2] or 1)
        position, pieces = 0, 1
        while pieces != wanted:
            if dims[order[position]] == dims[axis]:
                pieces *= mesh_shape[order[position]]
            position += 1
        order.insert(position, axis)
    offsets, sizes = [0] * len(shape), list(shape)
    for axis in order:
        dim = dims[axis]
        assert dim is not None
        n, piece = sizes[dim], math.ceil(sizes[dim] / mesh_shape[axis])
        start, stop = min(n, place[axis] * piece), min(n, (place[axis] + 1) * piece)
        offsets[dim], sizes[dim] = offsets[dim] + start, stop - start
    return offsets, sizes


def flat_boxes(shape: list[int], low: int, high: int) -> list[Box]:
    """Cut a range of row-major elements into boxes."""
    boxes = []
    while low < high:
        step = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        dim = next(
            (d for d in range(len(shape)) if low % step[d] == 0 and low + step[d] <= high), None
        )
        if dim is None:  # 0-d
            return [([], [])]
        place = [low // step[d] % shape[d] for d in range(len(shape))]
        steps = min((high - low) // step[dim], shape[dim] - place[dim])
        boxes.append((place, [1] * dim + [steps] + shape[dim + 1 :]))
        low += steps * step[dim]
    return boxes
