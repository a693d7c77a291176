"""The manifest: whole, of a version that is known, and consistent, or refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_ckpt.errors import CheckpointError, CorruptCheckpointError, UnsupportedFormatError
from fsdp_ckpt.manifest.schema import FileRow, Manifest, TensorRow, shard_name
from fsdp_ckpt.manifest.tree import ListIndex, TupleIndex
from fsdp_ckpt.plan.box import Box
from fsdp_ckpt.plan.layouts import FlatLayout, Layout, ListedLayout, Mesh, MeshLayout, Placement

ATTEMPT = "20260131T093000-1b9d6bcd"
WHERE = "s3://bucket/run/step-000000007/manifest.json"


def everywhere(world_size: int) -> MeshLayout:
    return MeshLayout(Mesh.world(world_size), (Placement(),))


def row(name: str, shape: tuple[int, ...], layout: Layout, replica: int = 0) -> TensorRow:
    return TensorRow(path=(name,), dtype="F32", shape=shape, layout=layout, replica=replica)


def file_rows(world_size: int) -> tuple[FileRow, ...]:
    return tuple(
        FileRow(
            name=shard_name(ATTEMPT, rank, world_size),
            num_bytes=8192 + rank,
            data_offset=4096,
            digest=f"{rank:016x}",
        )
        for rank in range(world_size)
    )


def make_manifest() -> Manifest:
    """A small manifest that has something of everything."""
    grid = Mesh((2, 2), (3, 1, 2, 0))
    return Manifest(
        step=7,
        attempt=ATTEMPT,
        world_size=4,
        generation=2,
        created="2026-01-31T09:30:00+00:00",
        library="0.1.0",
        tensors=(
            row("w", (8, 3), MeshLayout(Mesh.world(4), (Placement(0),))),
            row("v", (5,), MeshLayout(grid, (Placement(0, 2), Placement(0)))),
            row("b", (3,), everywhere(4), replica=3),
            row("f", (7, 2), FlatLayout(grid, 9, 3), replica=1),
            row("l", (2, 2), ListedLayout.of([(2, Box((0, 0), (1, 2))), (1, Box((1, 0), (1, 2)))])),
            TensorRow(
                path=("s", 0, ListIndex(1), TupleIndex(2)),
                dtype="BF16",
                shape=(),
                layout=everywhere(4),
            ),
        ),
        files=file_rows(4),
        values={("lr",): 0.1, ("group", 0): {"$": "tuple", "v": [0.9, 0.95]}, ("none",): None},
        rank_local=(("rng", "torch"),),
        partial=(("loader", 0),),
        varying=(("lr",),),
    )


def sealed(document: dict[str, Any]) -> bytes:
    """Write a document as a manifest is written, with a digest that matches."""
    body = json.dumps(document, separators=(",", ":")).encode()[:-1]
    return body + b',"digest":"' + xxhash.xxh3_64_hexdigest(body).encode() + b'"}'


def refusal_of(content: bytes) -> CheckpointError:
    """Return the error with which ``content`` is refused."""
    with pytest.raises(CheckpointError) as caught:
        Manifest.from_bytes(content, WHERE)
    error = caught.value
    assert type(error) in (CorruptCheckpointError, UnsupportedFormatError)
    assert str(error).startswith(f"{WHERE}: ")
    assert error.key == WHERE
    return error


def test_manifests_come_back() -> None:
    """What is written is read, paths and layouts included, and it is one line of ASCII."""
    manifest = make_manifest()
    content = manifest.to_bytes()
    assert content == sealed(manifest.to_json())
    assert content.isascii()
    assert b"\n" not in content
    back = Manifest.from_bytes(content, WHERE)
    assert back == manifest
    paths = [[type(part) for part in row.path] for row in back.tensors]
    assert paths == [[type(part) for part in row.path] for row in manifest.tensors]
    assert back.to_bytes() == content


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Draw a manifest of any world size with mesh layouts, values and paths of any kind."""
    mesh_shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    num_ranks = mesh_shape[0] * (mesh_shape[1] if len(mesh_shape) > 1 else 1)
    mesh = Mesh(mesh_shape, tuple(draw(st.permutations(range(num_ranks)))))
    parts = st.one_of(st.text(), st.integers(), st.builds(ListIndex, st.integers(0)))
    tensors = []
    for i in range(draw(st.integers(0, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=2)))
        dims = st.sampled_from([None, *range(len(shape))])
        layout = MeshLayout(mesh, tuple(Placement(draw(dims)) for _ in mesh_shape))
        path = (f"t{i}", *draw(st.lists(parts, max_size=2)))
        replica = draw(st.integers(0, layout.num_replicas - 1))
        tensors.append(
            TensorRow(path=path, dtype="I8", shape=shape, layout=layout, replica=replica)
        )
    values = draw(
        st.dictionaries(
            st.integers(0, 9).map(lambda i: (f"v{i}", i)),
            st.one_of(
                st.none(),
                st.text(),
                st.integers(),
                st.floats(allow_nan=False, allow_infinity=False),
            ),
            max_size=3,
        )
    )
    return Manifest(
        step=draw(st.integers(0, 2**63 - 1)),
        attempt=draw(st.text()),
        world_size=num_ranks,
        generation=draw(st.integers(0, 2**63 - 1)),
        tensors=tuple(tensors),
        files=file_rows(num_ranks),
        values=values,
        rank_local=(("own", draw(st.text())),),
    )


@settings(deadline=None)
@given(manifests())
def test_any_manifest_comes_back(manifest: Manifest) -> None:
    """Whatever a run consists of, its manifest is read as it was written."""
    assert Manifest.from_bytes(manifest.to_bytes(), WHERE) == manifest


def test_every_flipped_bit_is_noticed() -> None:
    """No bit of a manifest can change without the manifest being refused."""
    content = make_manifest().to_bytes()
    for i in range(len(content)):
        for bit in range(8):
            damaged = bytearray(content)
            damaged[i] ^= 1 << bit
            refusal_of(bytes(damaged))


def test_every_truncation_is_noticed() -> None:
    """A manifest that was torn off anywhere, or that something was added to, is refused."""
    content = make_manifest().to_bytes()
    for length in range(len(content)):
        refusal_of(content[:length])
    for extra in (b" ", b"\n", b"{}", content):
        refusal_of(content + extra)
        refusal_of(extra + content)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b"\0" * 100,
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"1" * 9999,
    ],
)
def test_other_content_is_damage(content: bytes) -> None:
    """What is no manifest at all is refused like a damaged one."""
    assert type(refusal_of(content)) is CorruptCheckpointError


@pytest.mark.parametrize("version", [2, 3, 10**30])
def test_newer_versions_ask_for_an_upgrade(version: int) -> None:
    """A newer format is no damage, whatever else has changed in it, digest included."""
    document = {"format": "fsdp_ckpt", "version": version, "tables": "all new"}
    for content in (sealed(document), json.dumps(document).encode()):
        error = refusal_of(content)
        assert type(error) is UnsupportedFormatError
        assert "upgrade" in str(error)


@pytest.mark.parametrize("version", [0, -1, True, 1.0, "1", None, [1]])
def test_versions_that_are_none_are_damage(version: Any) -> None:
    """A version is a positive integer."""
    document = make_manifest().to_json() | {"version": version}
    assert type(refusal_of(sealed(document))) is CorruptCheckpointError


def set_at(*path: Any) -> Callable[[Any], Callable[[dict[str, Any]], None]]:
    """Return a function of a value that makes a change: put the value at ``path`` of a document."""

    def changed(value: Any) -> Callable[[dict[str, Any]], None]:
        def change(document: dict[str, Any]) -> None:
            place: Any = document
            for part in path[:-1]:
                place = place[part]
            place[path[-1]] = value

        return change

    return changed


FILE_NAME = set_at("files", 0, 0)
DATA_OFFSET = set_at("files", 0, 2)
SHAPE = set_at("tensors", 0, 2)
LAYOUT = set_at("layouts", 0)
MESHES = set_at("meshes")
LISTED = set_at("layouts", 4, "chunks")

CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    **{
        f"file {name!r}": FILE_NAME(name)
        for name in (
            "", "rank.safetensors", "../rank.safetensors", "a/../rank.safetensors", "..",
            "a/..safetensors", "/a/rank.safetensors", "a/b/rank.safetensors", "a//rank.safetensors",
            "a/rank.pt", "a/.safetensors", "./rank.safetensors", ".a/rank.safetensors",
            "a/ra nk.safetensors", "a\\rank.safetensors", "a/rank.safetensors\n", "é/rank.safetensors",
            "s3://a/rank.safetensors", "a\0/rank.safetensors", 5, None,
        )
    },
    "a file too few": lambda d: d["files"].pop(),
    "a file too many": lambda d: d["files"].append(d["files"][0]),
    "no files": set_at("files")([]),
    "no ranks": lambda d: d.update(world_size=0, files=[]),
    "other world size": set_at("world_size")(3),
    "data before the header": DATA_OFFSET(8),
    "data beyond the file": DATA_OFFSET(8193),
    "negative offset": DATA_OFFSET(-4096),
    "negative size": set_at("files", 0, 1)(-1),
    "huge size": set_at("files", 0, 1)(2**63),
    "digest of no text": set_at("files", 0, 3)(0),
    "negative step": set_at("step")(-1),
    "huge step": set_at("step")(2**63),
    "step of no integer": set_at("step")(7.0),
    "step of no number": set_at("step")(True),
    "infinite step": set_at("step")(float("inf")),
    "attempt of no text": set_at("attempt")(None),
    "negative shape": SHAPE([-8, 3]),
    "huge shape": SHAPE([2**63, 3]),
    "shape of no integers": SHAPE([8.0, 3]),
    "shape of no list": SHAPE(8),
    "shape without the dim that is cut": SHAPE([]),
    "unknown dtype": set_at("tensors", 0, 1)("F99"),
    "no such layout": set_at("tensors", 0, 3)(99),
    "negative layout": set_at("tensors", 0, 3)(-1),
    "no such replica": set_at("tensors", 2, 4)(4),
    "negative replica": set_at("tensors", 2, 4)(-1),
    "two tensors of a name": lambda d: d["tensors"].append(d["tensors"][0]),
    "tensors whose names meet": lambda d: d["tensors"].append([["s.0", "1.2"], *d["tensors"][-1][1:]]),
    "a value named as a tensor": lambda d: d["values"].append([["w"], 1]),
    "two values of a name": lambda d: d["values"].append([["lr"], 1]),
    "a rank's own named as a value": lambda d: d["rank_local"].append(["lr"]),
    "some ranks' own named as all ranks' own": lambda d: d["partial"].append(["rng", "torch"]),
    "a path of no parts": set_at("tensors", 0, 0)([]),
    "a path of other parts": set_at("tensors", 0, 0)([None]),
    "a row too short": lambda d: d["tensors"][0].pop(),
    "a row too long": lambda d: d["tensors"][0].append(0),
    "no such mesh": LAYOUT({"mesh": 9, "placements": ["R"]}),
    "negative mesh": LAYOUT({"mesh": -1, "placements": ["R"]}),
    "too few placements": LAYOUT({"mesh": 0, "placements": []}),
    "unknown placement": LAYOUT({"mesh": 0, "placements": ["P"]}),
    "strided over nothing": LAYOUT({"mesh": 0, "placements": ["S0/3"]}),
    "a layout of nothing": LAYOUT({}),
    "a layout of no dict": LAYOUT(7),
    "a flat shard of nothing": LAYOUT({"mesh": 1, "flat": [0, 0]}),
    "a flat group too small": LAYOUT({"mesh": 1, "flat": [11, 0]}),
    "a flat group on a line": LAYOUT({"mesh": 0, "flat": [24, 0]}),
    "no axes": MESHES([{"shape": []}, {"shape": [2, 2]}]),
    "an axis of nothing": MESHES([{"shape": [0]}, {"shape": [2, 2]}]),
    "a mesh of more ranks than files": MESHES([{"shape": [5]}, {"shape": [2, 2]}]),
    "a mesh that fills the memory": MESHES([{"shape": [2**40]}, {"shape": [2, 2]}]),
    "a mesh with a rank twice": MESHES([{"shape": [4], "ranks": [0, 1, 2, 2]}, {"shape": [2, 2]}]),
    "a mesh of ranks beyond": MESHES([{"shape": [4], "ranks": [1, 2, 3, 4]}, {"shape": [2, 2]}]),
    "a mesh of too few ranks": MESHES([{"shape": [4], "ranks": [0, 1]}, {"shape": [2, 2]}]),
    "a listed gap": LISTED([[2, [0, 0], [1, 2]]]),
    "a listed overlap": LISTED([[2, [0, 0], [2, 2]], [1, [1, 0], [1, 2]]]),
    "listed outside": LISTED([[2, [0, 0], [1, 2]], [1, [2, 0], [1, 2]]]),
    "listed far outside": LISTED([[2, [0, 0], [1, 2]], [1, [2**63 - 1, 0], [1, 2]]]),
    "listed in other dims": LISTED([[2, [0], [2]]]),
    "listed on a rank beyond": LISTED([[4, [0, 0], [2, 2]]]),
    "listed with negative sizes": LISTED([[0, [0, 0], [-2, -2]]]),
    "a listed row too short": LISTED([[0, [0, 0]]]),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_documents_that_make_no_sense_are_refused(change: Callable[[dict[str, Any]], Any]) -> None:
    """A digest that matches makes no document valid: names, counts, ranks and chunks must fit together."""
    document = make_manifest().to_json()
    change(document)
    error = refusal_of(sealed(document))
    assert type(error) is CorruptCheckpointError


def test_a_mesh_is_refused_before_it_is_built() -> None:
    """The number of files bounds the ranks of a mesh, so that a few digits cannot fill the memory."""
    document = make_manifest().to_json() | {"meshes": [{"shape": [2**20]}]}
    assert "at most 4 ranks" in str(refusal_of(sealed(document)))


def test_the_unchanged_document_is_accepted() -> None:
    """The changes above are what is refused, not the document they change."""
    assert Manifest.from_bytes(sealed(make_manifest().to_json()), WHERE) == make_manifest()


@pytest.mark.parametrize("value", [None, 7, -1, 1.5, "x", [], [[]], {}, {"a": 1}, True])
def test_every_field_must_be_there_and_of_its_type(value: Any) -> None:
    """A document without one of its fields, or with another kind of thing in its place, is refused."""
    document = make_manifest().to_json()
    for name in document:
        lacking = {k: v for k, v in document.items() if k != name}
        refusal_of(sealed(lacking))
        try:
            Manifest.from_bytes(sealed(document | {name: value}), WHERE)
        except (CorruptCheckpointError, UnsupportedFormatError):
            continue
        # What remains are texts and counts for texts and counts, and lists that may be empty.
        allowed = {
            "attempt": "x", "created": "x", "library": "x", "step": 7, "generation": 7,
            "values": [], "rank_local": [], "partial": [], "varying": [], "tensors": [], "inline": {},
        }  # fmt: skip
        is_empty = isinstance(allowed[name], list | dict)
        assert not value if is_empty else value == allowed[name]


ANY_JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=5),
        st.sampled_from(["S0", "R"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(["shape", "ranks", "mesh", "placements", "flat", "chunks"]), inner
        ),
    ),
    max_leaves=8,
)


def places_in(document: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key or position) of every part."""
    items: Any = ()
    if isinstance(document, dict):
        items = document.items()
    elif isinstance(document, list):
        items = enumerate(document)
    for key, part in list(items):
        yield document, key
        yield from places_in(part)


@settings(deadline=None)
@given(ANY_JSON, st.randoms(use_true_random=False))
def test_any_change_is_accepted_whole_or_refused(other: Any, random: Any) -> None:
    """A document of which one part was replaced or lost is a sound manifest, or refused by our errors."""
    document = make_manifest().to_json()
    container, key = random.choice(list(places_in(document)))
    container[key] = copy.deepcopy(other)
    check_or_refuse(sealed(document))
    del container[key]
    check_or_refuse(sealed(document))


def check_or_refuse(content: bytes) -> None:
    try:
        manifest = Manifest.from_bytes(content, WHERE)
    except (CorruptCheckpointError, UnsupportedFormatError):
        return
    for tensor in manifest.tensors:
        assert all(rank < manifest.world_size for rank in tensor.chunks.ranks)


def test_size_grows_with_tensors_and_ranks_not_their_product() -> None:
    """Each tensor and each rank adds its row; together they add nothing more."""

    def size(num_tensors: int, world_size: int) -> int:
        grid = Mesh((2, world_size // 2), tuple(range(world_size)))
        layouts: list[Layout] = [
            MeshLayout(Mesh.world(world_size), (Placement(0),)),
            MeshLayout(grid, (Placement(), Placement(1))),
            everywhere(world_size),
        ]
        tensors = tuple(
            row(f"t{i:05d}", (8192, 8192), layouts[i % 3]) for i in range(num_tensors)
        ) + tuple(
            row(f"f{i:05d}", (8192,), FlatLayout(grid, 8192 * 8192, 8192 * i))
            for i in range(num_tensors)
        )
        manifest = Manifest(
            step=1,
            attempt=ATTEMPT,
            world_size=world_size,
            tensors=tensors,
            files=file_rows(world_size),
        )
        return len(manifest.to_bytes())

    tensors, ranks = size(700, 64) - size(100, 64), size(100, 1024) - size(100, 64)
    together = size(700, 1024) - size(100, 64)
    assert abs(together - tensors - ranks) < 100
    assert size(100, 1024) < 2**17


def test_shard_names_sort_by_rank() -> None:
    """A shard's name says whose it is, of how many, and of which attempt."""
    assert shard_name("a1", 3, 16) == "a1/rank-00003-of-00016.safetensors"
    names = [shard_name("a1", rank, 16384) for rank in (0, 9, 10, 16383)]
    assert names == sorted(names)
