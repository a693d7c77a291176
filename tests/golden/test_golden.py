"""Version 1 of the format stays readable for ever: a checkpoint that was written when it was new.

Three readers: this package, the safetensors library, and ``plain_reader``, written after docs/format.md.
What all of them must find is spelt out here. ``make_golden.py`` wrote the checkpoint.
"""

from __future__ import annotations

import collections
import functools
import http
import itertools
import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open

from fsdp_ckpt import ReshardLoadPlanner, ShardedStorageReader
from fsdp_ckpt.commit.checkpoint import Checkpoint
from fsdp_ckpt.commit.verify import find_damage
from fsdp_ckpt.dcp.live import CODEC
from fsdp_ckpt.dcp.pieces import piece_tensor
from fsdp_ckpt.manifest.schema import Manifest
from fsdp_ckpt.manifest.shard import ShardHeader
from fsdp_ckpt.manifest.tree import path_name, unflatten
from fsdp_ckpt.plan.flat import flat_range_boxes
from fsdp_ckpt.plan.mesh import Mesh, MeshLayout, Placement
from fsdp_ckpt.storage.open import open_store
from tests.bits import bits
from tests.golden.plain_reader import ITEMSIZE, flat_boxes, read_tensors

STEP = Path(__file__).resolve().parent / "v1" / "step-000000042"
ATTEMPT = "20260101T000000-0123456789ab"
WORLD_SIZE = 3

# dtype in the manifest -> name in torch; two elements of each, with the bytes 1, 2, 3, ...
DTYPES = {
    "U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64", "U16": "uint16",
    "U32": "uint32", "U64": "uint64", "F16": "float16", "BF16": "bfloat16", "F32": "float32",
    "F64": "float64", "C32": "complex32", "C64": "complex64", "C128": "complex128",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu", "F4_E2M1_X2": "float4_e2m1fn_x2",
}  # fmt: skip
TORCH_NAMES = {**DTYPES, "BOOL": "bool"}


def count(dtype: str, start: int, *shape: int) -> np.ndarray:
    """Return start, start + 1, ... in row-major order."""
    return np.arange(start, start + math.prod(shape), dtype=dtype).reshape(shape)


# name -> (dtype in the manifest, shape, bytes)
TENSORS: dict[str, tuple[str, tuple[int, ...], bytes]] = {
    name: (dtype, array.shape, array.tobytes())
    for name, dtype, array in (
        ("model.rows.weight", "F32", count("f4", 0, 5, 4)),
        ("model.rows.bias", "F32", count("f4", 50, 5)),
        ("model.column.weight", "F32", count("f4", 100, 7, 2)),
        ("model.tiny.weight", "BF16", np.array([[0x40E0]], "u2")),  # 7.0
        ("buffers.count", "I64", np.array(7)),
        ("buffers.mask", "BOOL", np.array([True, False, True])),
        ("buffers.empty", "F32", np.zeros((0, 3), "f4")),
        ("buffers.running", "F32", count("f4", 0, 4)),
        ("optimizer.state.rows.weight.exp_avg", "F64", count("f8", 200, 5, 4)),
        ("optimizer.state.rows.weight.step", "F32", np.array(42, "f4")),
        ("placed.turned", "I32", count("i4", 300, 4)),
        ("placed.columns", "I32", count("i4", 400, 2, 4)),
        ("flat.first", "F32", count("f4", 500, 4, 5)),
        ("flat.second", "F32", count("f4", 520, 2, 3)),
        ("containers.list.0", "I64", count("i8", 0, 2)),
        ("containers.list.1.inner", "I64", count("i8", 0, 3)),
        ("containers.tuple.0", "I64", count("i8", 0, 4)),
        ("containers.tuple.2.0", "I64", count("i8", 0, 5)),
        ("containers.3.int key", "I64", count("i8", 0, 6)),
        ("dtypes.bool", "BOOL", np.array([True, False])),
    )
}
TENSORS |= {
    f"dtypes.{name}": (dtype, (2,), bytes(range(1, 1 + 2 * ITEMSIZE.get(dtype, 1))))
    for dtype, name in DTYPES.items()
}
VALUES: dict[str, Any] = {
    "optimizer.param_groups.0.params": ["rows.weight"],
    "optimizer.param_groups.0.betas": (0.9, 0.95),
    "optimizer.param_groups.0.lr": 0.001,
    "containers.tuple.1": "between",
    "values.none": None,
    "values.bool": True,
    "values.int": -3,
    "values.long int": (1 << 5000) + 1,
    "values.float": 0.1,
    "values.negative zero": -0.0,
    "values.infinity": math.inf,
    "values.nan": struct.unpack(">d", b"\x7f\xf8\0\0\0\0\x01\x23")[0],
    "values.complex": complex(1.5, -math.inf),
    "values.str": "ä\n\U0001f600",
    "values.bytes": b"\x00\xff",
    "values.bytearray": bytearray(b"ab"),
    "values.tuple": (1, (2.5, "x"), []),
    "values.list": [1, None, [True]],
    "values.set": {1, 2, 3},
    "values.frozenset": frozenset({(1, "a")}),
    "values.range": range(1, 9, 2),
    "values.deque": collections.deque([1, 2], maxlen=3),
    "values.dict.nested": {1: "one", (2, 3): "pair"},
    "values.dict.empty": {},
    "values.dollar": ({"$": "not a tag"},),
    "values.OrderedDict": collections.OrderedDict([("b", 1), ("a", 2)]),
    "values.Counter": collections.Counter({"a": 2, "b": 0}),
    "values.defaultdict": collections.defaultdict(list, {"x": [1]}),
    "values.enum": http.HTTPStatus.NOT_FOUND,
    "values.scalar": np.float32(0.1),
    "values.datetime64": np.datetime64("2026-01-01T00:00:00"),
    "values.ndarray": np.array([[1, 2], [3, 4]], ">i2"),
    "values.dtype": torch.bfloat16,
    "values.size": torch.Size([2, 0]),
    "values.device": torch.device("cuda:1"),
    "values.layout": torch.strided,
    "values.memory_format": torch.channels_last,
    "worker.id": 10,
    "worker.same": "on all ranks",
}


def own_tensors(rank: int) -> dict[str, bytes]:
    """What each rank has for itself."""
    running = {"buffers.running": count("f4", 10 * rank, 4).tobytes()} if rank else {}
    return {**running, "rng.state": bytes(range(rank, rank + 5))}


def own_values(rank: int) -> dict[str, Any]:
    """What each rank has for itself."""
    worker = {"worker.id": 10 + rank} if rank else {}
    numpy = np.array([0, rank, 2 * rank], "u4")
    device = {"rng.device": "on one rank only"} if rank == 1 else {}
    return {**worker, "rng.python": (3, (rank, rank + 1), None), "rng.numpy": numpy, **device}


def data_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def file_of(rank: int) -> Path:
    return STEP / ATTEMPT / f"rank-{rank:05d}-of-{WORLD_SIZE:05d}.safetensors"


# --- this package ---


def test_dcp_loads_every_tensor_and_value_in_one_process() -> None:
    """A checkpoint of three ranks loads into plain tensors, in dtype, shape and bits; values in type too."""
    manifest = Checkpoint.open(open_store(STEP)).manifest
    blanks: dict[Any, Any] = {}
    for row in manifest.tensors:
        if hasattr(torch, TORCH_NAMES[row.dtype]):  # older ones lack some
            raw = torch.zeros(math.prod(row.shape) * ITEMSIZE.get(row.dtype, 1), dtype=torch.uint8)
            blanks[row.path] = raw.view(getattr(torch, TORCH_NAMES[row.dtype])).reshape(row.shape)
    blanks |= dict.fromkeys(manifest.values)
    state = unflatten(blanks.items())
    dcp.load(state, storage_reader=ShardedStorageReader(STEP), planner=ReshardLoadPlanner())
    loaded = {
        path_name(path): functools.reduce(lambda n, part: n[part], path, state) for path in blanks
    }
    for name, (_, shape, data) in TENSORS.items():
        if name in loaded:
            tensor = loaded.pop(name)
            assert (tuple(tensor.shape), data_of(tensor)) == (shape, data), name
    assert {n: bits(v) for n, v in loaded.items()} == {n: bits(v) for n, v in VALUES.items()}
    assert loaded["values.defaultdict"].default_factory is list


@pytest.mark.parametrize("rank", range(WORLD_SIZE))
def test_each_rank_has_its_own_tensors_and_values(rank: int) -> None:
    """What is declared rank-local, and what differs, stands in each rank's file, and nothing else does."""
    checkpoint = Checkpoint.open(open_store(STEP))
    header = checkpoint.header(rank)
    assert (header.rank, header.step, header.attempt) == (rank, 42, ATTEMPT)
    values = {path_name(path): bits(CODEC.decode(value)) for path, value in header.values.items()}
    assert values == {name: bits(value) for name, value in own_values(rank).items()}
    assert header.own == own_tensors(rank).keys()
    pieces = {name: checkpoint.own_piece(rank, name) for name in header.own}
    images = checkpoint.read(piece for piece in pieces.values() if piece is not None)
    found = {name: data_of(piece_tensor(images, piece)) for name, piece in pieces.items() if piece}
    assert found == own_tensors(rank)


def test_manifest_says_what_was_saved() -> None:
    """Step, generation, ranks and the names of what is not the same everywhere."""
    manifest = Manifest.from_bytes((STEP / "manifest.json").read_bytes(), "golden")
    assert (manifest.step, manifest.generation, manifest.world_size) == (42, 1, WORLD_SIZE)
    assert (manifest.attempt, manifest.created) == (ATTEMPT, "2026-01-01T00:00:00+00:00")
    assert [path_name(p) for p in manifest.rank_local] == ["rng.state", "rng.python", "rng.numpy"]
    assert [path_name(p) for p in manifest.partial] == ["rng.device"]
    assert [path_name(p) for p in manifest.varying] == ["buffers.running", "worker.id"]
    assert {r.name: (r.dtype, r.shape) for r in manifest.tensors} == {
        name: (dtype, shape) for name, (dtype, shape, _) in TENSORS.items()
    }


def test_nothing_is_damaged() -> None:
    """Every byte has the digest that was written with it."""
    assert list(find_damage(Checkpoint.open(open_store(STEP)))) == []


# --- written as then ---


def test_manifest_is_written_byte_for_byte_as_then() -> None:
    """The same manifest becomes the same file, and the same values the same typed JSON."""
    content = (STEP / "manifest.json").read_bytes()
    manifest = Manifest.from_bytes(content, "golden")
    assert manifest.to_bytes() == content
    for path, encoded in manifest.values.items():
        assert CODEC.encode(CODEC.decode(encoded), path_name(path)) == encoded


@pytest.mark.parametrize("rank", range(WORLD_SIZE))
def test_shard_header_is_written_byte_for_byte_as_then(rank: int) -> None:
    """The same contents become the same header."""
    content = file_of(rank).read_bytes()
    region = content[: 8 + int.from_bytes(content[:8], "little")]
    assert ShardHeader.from_bytes(region, "golden").to_bytes() == region


# --- the safetensors library, and docs/format.md ---


@pytest.mark.parametrize("rank", range(WORLD_SIZE))
def test_safetensors_reads_every_shard(rank: int) -> None:
    """Every entry is a tensor for the safetensors library; no bytes lie outside of the entries."""
    with safe_open(file_of(rank), "np") as shard:
        about = json.loads(shard.metadata()["fsdp_ckpt"])
        assert set(shard.keys()) == set(about["entries"])
    with safe_open(file_of(rank), "pt") as shard:
        found = {key: data_of(shard.get_tensor(key)) for key in shard.keys()}  # noqa: SIM118
    content = file_of(rank).read_bytes()
    data_offset = 8 + int.from_bytes(content[:8], "little")
    assert data_offset % 4096 == 0
    header = json.loads(content[8:data_offset])
    in_order = sorted(about["entries"], key=lambda key: header[key]["data_offsets"])
    assert b"".join(found[key] for key in in_order) == content[data_offset:]
    widths = [ITEMSIZE.get(about["entries"][key][1], 1) for key in in_order]
    assert widths == sorted(widths, reverse=True)


def test_a_reader_after_the_specification_finds_every_tensor() -> None:
    """docs/format.md is enough to read a checkpoint: safetensors, JSON and the rules for chunks."""
    assert read_tensors(STEP) == TENSORS


def test_flat_shards_are_cut_as_specified() -> None:
    """The rule for flat shards, written twice, gives the same chunks."""
    for shape in ([], [5], [4, 5], [2, 3, 4], [1, 1], [1, 3], [3, 1, 2], [2, 2, 1, 3]):
        num_elements = math.prod(shape)
        for low, high in itertools.combinations(range(num_elements + 1), 2):
            boxes = flat_range_boxes(tuple(shape), low, high)
            expected = [(list(box.offsets), list(box.sizes)) for box in boxes]
            assert flat_boxes(shape, low, high) == expected, (shape, low, high)


@pytest.mark.parametrize(
    ("placements", "starts"),
    [("S0 S0", [0, 2, 3, 4]), ("S0/2 S0", [0, 3, 2, 4]), ("R S0", [0, 3, 0, 3])],
)
def test_examples_of_the_specification(placements: str, starts: list[int]) -> None:
    """The table in docs/format.md: shape [5, 3] on a mesh of 2 x 2."""
    parsed = tuple(map(Placement.parse, placements.split()))
    layout = MeshLayout(Mesh((2, 2), (0, 1, 2, 3)), parsed)
    boxes = [layout.box_of((5, 3), rank) for rank in range(4)]
    assert [box.offsets[0] for box in boxes if box] == starts


def test_small_tensors_of_all_ranks_stand_in_the_manifest_too() -> None:
    """A tensor of up to 64 bytes that all ranks hold is in the manifest, with the bytes of its file."""
    manifest = Manifest.from_bytes((STEP / "manifest.json").read_bytes(), "golden")
    assert {"buffers.count", "optimizer.state.rows.weight.step"} <= manifest.inline.keys()
    assert "buffers.running" not in manifest.inline
    for name, content in manifest.inline.items():
        assert content == TENSORS[name][2]
