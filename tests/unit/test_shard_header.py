"""The header of a shard file: plain safetensors, and a description of itself that is whole or refused."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from fsdp_ckpt.dcp.live import torch_dtype
from fsdp_ckpt.errors import CheckpointError, CorruptCheckpointError
from fsdp_ckpt.manifest import shard
from fsdp_ckpt.manifest.shard import DIGEST_HEX, ShardHeader
from fsdp_ckpt.manifest.tree import ListIndex, path_name
from fsdp_ckpt.plan.box import Box
from fsdp_ckpt.plan.dtypes import stored_form
from fsdp_ckpt.plan.image import BLOCK_BYTES, ImageLayout

WHERE = "a1/rank-00001-of-00004.safetensors"
DTYPES = [
    "BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "U16", "I16", "F16", "BF16", "U32", "I32",
    "F32", "U64", "I64", "F64", "C64", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4_E2M1_X2", "C32", "C128",
]  # fmt: skip
Chunk = tuple[tuple[Any, ...], str, tuple[int, ...], Box]


def make_header(chunks: list[Chunk], **fields: Any) -> ShardHeader:
    """Build the header of a file with these (path, dtype, shape, box) chunks."""
    layout = ImageLayout.pack((path_name(path), *rest) for path, *rest in chunks)
    return ShardHeader(
        step=7,
        attempt="a1",
        rank=1,
        world_size=4,
        layout=layout,
        paths={path_name(path): path for path, *_ in chunks},
        **fields,
    )


def small_header() -> ShardHeader:
    """A header that has something of everything."""
    return make_header(
        [
            (("w",), "F32", (8, 3), Box((2, 0), (2, 3))),
            (("w",), "F32", (8, 3), Box((6, 0), (2, 3))),
            (("m", 0, ListIndex(1)), "C128", (4,), Box((1,), (2,))),
            (("rng", "torch"), "U8", (5,), Box((0,), (5,))),
            (("none",), "I8", (0, 3), Box((0, 0), (0, 3))),
            (("one",), "BF16", (), Box((), ())),
        ],
        own=frozenset({"rng.torch", "none"}),
        values={("rng", "python"): {"$": "tuple", "v": [3, None]}},
        shared={("lr", 0): 0.1},
        digests=("0123456789abcdef",),
        manifest={"step": 7},
    )


def header_json(region: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a header region says: the safetensors part, and our own."""
    header = json.loads(region[8:])
    return header, json.loads(header["__metadata__"]["fsdp_ckpt"])


def region_of(header: Any, about: Any) -> bytes:
    """Write a header region of any content, its length field right."""
    if about is not None:
        header["__metadata__"]["fsdp_ckpt"] = json.dumps(about)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


def test_headers_come_back() -> None:
    """What is written is read, with the types of all parts of paths."""
    header = small_header()
    back = ShardHeader.from_bytes(header.to_bytes(), WHERE)
    assert back == header
    for name, path in header.paths.items():
        assert [type(part) for part in back.paths[name]] == [type(part) for part in path]


@st.composite
def headers(draw: st.DrawFn) -> ShardHeader:
    """Draw a header of chunks of any dtype and shape, whose names may collide with keys."""
    names = st.sampled_from(["w", "w#1", "v", "", "__metadata__", "é.\n\"'", "\U0001f600"])
    dtypes: dict[str, str] = {}
    chunks: list[Chunk] = []
    for start in range(draw(st.integers(0, 5))):
        name = draw(names)
        dtype = dtypes.setdefault(name, draw(st.sampled_from(DTYPES)))
        sizes = tuple(draw(st.lists(st.integers(0, 4), min_size=1, max_size=3)))
        box = Box((10 * start, *(0 for _ in sizes[1:])), sizes)
        chunks.append(((name,), dtype, (100, *sizes[1:]), box))
    header = make_header(chunks, values={("v", draw(st.text())): draw(st.text())})
    digests = draw(
        st.lists(
            st.text("0123456789abcdef", min_size=DIGEST_HEX, max_size=DIGEST_HEX),
            min_size=header.layout.num_blocks,
            max_size=header.layout.num_blocks,
        )
    )
    own = frozenset(draw(st.sets(st.sampled_from(sorted(header.paths))))) if chunks else frozenset()
    return dataclasses.replace(header, own=own, digests=tuple(digests))


@settings(deadline=None)
@given(headers())
def test_any_header_comes_back_and_fills_whole_pages(header: ShardHeader) -> None:
    """Data starts on a page, at a place that was known before the digests were."""
    region = header.to_bytes()
    assert ShardHeader.from_bytes(region, WHERE) == header
    assert len(region) % 4096 == 0
    assert int.from_bytes(region[:8], "little") == len(region) - 8
    assert len(dataclasses.replace(header, digests=()).to_bytes()) == len(region)


@pytest.mark.parametrize("num_blocks", [0, 1, 2, 300, 1000])
def test_room_for_the_digests_is_kept(num_blocks: int) -> None:
    """Before the data is digested, the header already has the length that it will have."""
    size = max(num_blocks * BLOCK_BYTES - 5, 0)
    header = make_header([(("w",), "U8", (size,), Box((0,), (size,)))])
    assert header.layout.num_blocks == num_blocks
    digests = tuple(f"{i:016x}" for i in range(num_blocks))
    done = dataclasses.replace(header, digests=digests)
    assert len(done.to_bytes()) == len(header.to_bytes())
    assert ShardHeader.from_bytes(done.to_bytes(), WHERE).digests == digests


def write_file(path: Path, header: ShardHeader) -> dict[str, bytes]:
    """Write a shard file of random data; return key → bytes."""
    data = np.random.default_rng(0).integers(0, 2, header.layout.data_bytes, np.uint8).tobytes()
    path.write_bytes(header.to_bytes() + data)
    return {e.key: data[e.byte_offset : e.byte_offset + e.num_bytes] for e in header.layout.entries}


def test_safetensors_reads_every_dtype(tmp_path: Path) -> None:
    """The reader of safetensors finds each chunk, as bytes where it knows no such dtype."""
    chunks: list[Chunk] = [((d,), d, (9, 3), Box((2, 0), (2, 3))) for d in DTYPES]
    chunks += [
        (("scalar",), "F32", (), Box((), ())),
        (("empty",), "F64", (0, 2), Box((0, 0), (0, 2))),
    ]
    header = make_header(chunks)
    held = write_file(tmp_path / "shard.safetensors", header)
    with safe_open(tmp_path / "shard.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(held)
        assert file.metadata()["format"] == "pt"
        assert json.loads(file.metadata()["fsdp_ckpt"])["attempt"] == "a1"
        for entry in header.layout.entries:
            stored, shape = stored_form(entry.dtype, entry.box.sizes)
            tensor = file.get_tensor(entry.key)
            assert tensor.dtype == torch_dtype(stored)
            assert tuple(tensor.shape) == shape
            assert bytes(tensor.reshape(-1).view(torch.uint8).tolist()) == held[entry.key]


def test_numpy_reads_shards(tmp_path: Path) -> None:
    """Without torch too, chunks of one tensor under keys of their own."""
    header = make_header(
        [
            (("w",), "F32", (8, 3), Box((2, 0), (2, 3))),
            (("w",), "F32", (8, 3), Box((6, 0), (1, 3))),
            (("__metadata__",), "I64", (2,), Box((0,), (2,))),
            (("z",), "C128", (2,), Box((0,), (2,))),
        ]
    )
    held = write_file(tmp_path / "shard.safetensors", header)
    arrays = safetensors.numpy.load_file(tmp_path / "shard.safetensors")
    assert {key: array.tobytes() for key, array in arrays.items()} == held
    assert {key: array.shape for key, array in arrays.items()} == {
        "w": (2, 3), "w#1": (1, 3), "__metadata__#1": (2,), "z": (2, 16),
    }  # fmt: skip


def test_a_header_beyond_the_readers_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What safetensors would not read is not written."""
    fits, too_large = ("x" * n for n in (100, 10_000))
    monkeypatch.setattr(shard, "MAX_HEADER_BYTES", 4096)
    make_header([], values={("v",): fits}).to_bytes()
    with pytest.raises(CheckpointError, match="rank 1") as caught:
        make_header([], values={("v",): too_large}).to_bytes()
    assert caught.value.rank == 1


def refuse(region: bytes) -> None:
    with pytest.raises(CorruptCheckpointError) as caught:
        ShardHeader.from_bytes(region, WHERE)
    assert str(caught.value).startswith(f"{WHERE}: ")
    assert caught.value.key == WHERE


def accept_or_refuse(region: bytes) -> None:
    message = ""
    try:
        ShardHeader.from_bytes(region, WHERE)
    except CorruptCheckpointError as e:
        message = str(e)
    assert len(message.splitlines()) <= 1


Change = Callable[[dict[str, Any], dict[str, Any]], Any]


def put(part: str, *path: Any) -> Callable[[Any], Change]:
    """Return a function of a value that makes a change: the value at ``path`` of the header or of ours."""

    def changed(value: Any) -> Change:
        def change(header: dict[str, Any], about: dict[str, Any]) -> None:
            place: Any = header if part == "header" else about
            for step in path[:-1]:
                place = place[step]
            place[path[-1]] = value

        return change

    return changed


OFFSETS = put("header", "w", "data_offsets")
STORED = put("header", "w", "shape")
ENTRY = put("about", "entries", "w")

CHANGES: dict[str, Change] = {
    "no metadata": lambda h, a: h.pop("__metadata__"),
    "metadata of another program": put("header", "__metadata__")({"format": "pt"}),
    "an entry that is not in the file": lambda h, a: h.pop("w"),
    "a negative start": OFFSETS([-24, 0]),
    "a start beyond the stop": OFFSETS([56, 32]),
    "fewer bytes than the shape has": OFFSETS([32, 52]),
    "offsets of no integers": OFFSETS([32.0, 56.0]),
    "offsets of another entry": OFFSETS([56, 80]),
    "one offset": OFFSETS([32]),
    "huge offsets": OFFSETS([2**63, 2**63 + 24]),
    "negative sizes": STORED([-2, -3]),
    "sizes of no integers": STORED([2.0, 3.0]),
    "other sizes of as many bytes": STORED([6, 1, 1]),
    "another stored dtype": put("header", "w", "dtype")("I32"),
    "raw bytes of another width": put("header", "m.0.1", "shape")([4, 8]),
    "raw bytes without their dim": put("header", "m.0.1", "shape")([32]),
    "no shape": lambda h, a: h["w"].pop("shape"),
    "an unknown dtype": ENTRY([["w"], "F99", [8, 3], [2, 0]]),
    "another dtype of as many bytes": ENTRY([["w"], "I32", [8, 3], [2, 0]]),
    "a dtype of no text": ENTRY([["w"], None, [8, 3], [2, 0]]),
    "a tensor of other dims": ENTRY([["w"], "F32", [24], [2, 0]]),
    "offsets of other dims": ENTRY([["w"], "F32", [8, 3], [2]]),
    "a negative offset": ENTRY([["w"], "F32", [8, 3], [-2, 0]]),
    "an offset of no integer": ENTRY([["w"], "F32", [8, 3], [2.0, 0]]),
    "a shape of no integers": ENTRY([["w"], "F32", [8.0, 3], [2, 0]]),
    "a path of no parts": ENTRY([[], "F32", [8, 3], [2, 0]]),
    "an entry too short": ENTRY([["w"], "F32", [8, 3]]),
    "an entry of no list": ENTRY(None),
    "entries of no dict": put("about", "entries")([]),
    "a gap": lambda h, a: (a["entries"].pop("w"), h.pop("w")),
    "a digest too few": put("about", "digests", "blocks")(""),
    "a digest too many": put("about", "digests", "blocks")("0" * 32),
    "a digest too short": put("about", "digests", "blocks")("0" * 15),
    "digests of no text": put("about", "digests", "blocks")(["0"] * 16),
    "digests of other blocks": put("about", "digests", "block_bytes")(4096),
    "digests of another kind": put("about", "digests", "algorithm")("md5"),
    "no digests": lambda h, a: a.pop("digests"),
    "a rank of no integer": put("about", "rank")("1"),
    "a negative rank": put("about", "rank")(-1),
    "a step of no integer": put("about", "step")(7.0),
    "an attempt of no text": put("about", "attempt")(None),
    "no world size": lambda h, a: a.pop("world_size"),
    "values of no pairs": put("about", "values")([[["v"]]]),
    "values of no path": put("about", "values")([[[], 1]]),
    "shared values of no path": put("about", "shared")([[[], 1]]),
    "no shared values": lambda h, a: a.pop("shared"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_headers_that_make_no_sense_are_refused(change: Change) -> None:
    """Entries, sizes, offsets and digests must fit together, and nothing may be missing."""
    header, about = header_json(small_header().to_bytes())
    assert ShardHeader.from_bytes(region_of(header, about), WHERE) == small_header()
    change(header, about)
    refuse(region_of(header, about if "fsdp_ckpt" in header.get("__metadata__", {}) else None))


def test_overlap_and_gap_do_not_make_up_for_each_other() -> None:
    """Entries that overlap are refused even where the bytes add up."""
    box = Box((0,), (4,))
    region = make_header([((name,), "U8", (4,), box) for name in "abc"]).to_bytes()
    header, about = header_json(region)
    header["b"]["data_offsets"] = [0, 4]
    refuse(region_of(header, about))


@pytest.mark.parametrize(
    "region",
    [
        b"",
        bytes(7),
        bytes(8),
        bytes(4096),
        b"\x02" + bytes(7) + b"[]",
        b"\x04" + bytes(7) + b"null",
        b"\xff" * 64,
    ],
)
def test_other_files_are_refused(region: bytes) -> None:
    """What is no header of ours is damage, as is JSON nested without end."""
    refuse(region)
    text = b"[" * 100_000
    refuse(len(text).to_bytes(8, "little") + text)


def test_truncated_headers_are_refused() -> None:
    """A header that was torn off anywhere, or that something was added to, is refused."""
    region = small_header().to_bytes()
    for length in range(0, len(region), 7):
        refuse(region[:length])
    refuse(region + b" ")


def test_flipped_bytes_are_read_or_refused() -> None:
    """A damaged header never makes reading fail with a foreign error; its digest tells in the end."""
    region = small_header().to_bytes()
    for i in range(len(region.rstrip(b" ")) + 1):
        for flip in (0x01, 0x02, 0x10, 0x20, 0x80):
            damaged = bytearray(region)
            damaged[i] ^= flip
            accept_or_refuse(bytes(damaged))


ANY_JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=5),
        st.sampled_from(DTYPES),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(["w", "dtype", "shape"]), inner),
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
def test_any_change_is_read_or_refused(other: Any, random: Any) -> None:
    """A header of which one part was replaced or lost is another header, or damage."""
    header, about = header_json(small_header().to_bytes())
    both = {"header": header, "about": about}
    container, key = random.choice(list(places_in(both))[1:])
    for change in ("replace", "lose"):
        if change == "replace":
            container[key] = copy.deepcopy(other)
        else:
            container.pop(key)
        header, about = both.get("header"), both.get("about")
        text = json.dumps(about)
        if isinstance(header, dict) and isinstance(header.get("__metadata__"), dict):
            header["__metadata__"]["fsdp_ckpt"] = text
        accept_or_refuse(region_of(header, None))
