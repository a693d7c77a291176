"""Hostile manifests, headers and values: an error of our tree, soon, in memory that the input is worth."""

from __future__ import annotations

import base64
import copy
import json
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsdp_ckpt.dcp.live import CODEC
from fsdp_ckpt.errors import CheckpointError, CorruptCheckpointError
from fsdp_ckpt.manifest.schema import Manifest
from fsdp_ckpt.manifest.shard import ShardHeader
from fsdp_ckpt.manifest.tree import path_from_json
from scripts import fuzz
from scripts.fuzz_targets import (
    golden_parts,
    read_header,
    run,
    seal_header,
    seal_manifest,
    write_header,
    write_json,
)

pytestmark = pytest.mark.slow

PARTS = golden_parts()
DOCUMENT = PARTS["manifest"]
HEADER = next(iter(PARTS["headers"].values()))
PRIME = 2**61 - 1  # ints are hashed modulo it
# For inputs of some MB, a few tenths on an idle machine; unbounded ones take minutes.
SECONDS = 20.0
MB = 10**6


@contextmanager
def bounded(seconds: float = SECONDS, megabytes: float = 100) -> Iterator[None]:
    """Fail where the block takes long, or much memory at a time."""
    tracemalloc.start()
    start = time.process_time()
    try:
        yield
        took, held = time.process_time() - start, tracemalloc.get_traced_memory()[1] / MB
    finally:
        tracemalloc.stop()
    assert took < seconds, f"{took:.1f} s"
    assert held < megabytes, f"{held:.0f} MB"


def refuse_manifest(document: Any, words: str, megabytes: float = 100) -> None:
    content = seal_manifest(write_json(document))
    with bounded(megabytes=megabytes), pytest.raises(CorruptCheckpointError, match=words) as caught:
        Manifest.from_bytes(content, "manifest.json")
    assert len(str(caught.value)) < 1000


def refuse_header(header: Any, words: str) -> None:
    with bounded(), pytest.raises(CorruptCheckpointError, match=words) as caught:
        ShardHeader.from_bytes(write_header(header), "shard")
    assert len(str(caught.value)) < 1000


def changed(document: Any, **fields: Any) -> Any:
    return {**copy.deepcopy(document), **fields}


HOSTILE = st.one_of(st.sampled_from(fuzz.VALUES), st.integers(), st.floats(), st.text(max_size=3))


@st.composite
def mutations(draw: st.DrawFn, document: Any) -> Any:
    """Draw a document of which up to three parts are hostile, lost, doubled or elsewhere."""
    holder = [copy.deepcopy(document)]
    for _ in range(draw(st.integers(1, 3))):
        where = list(fuzz.places(holder))
        container, key = where[draw(st.integers(0, len(where) - 1))]
        match draw(st.integers(0, 3)):
            case 0 if isinstance(container, dict) or len(container) > 1:
                del container[key]
            case 1 if isinstance(container, list):
                container.append(copy.deepcopy(container[key]))
            case 1:
                container[fuzz.TWICE + str(key)] = copy.deepcopy(draw(HOSTILE))
            case 2:
                other, at = where[draw(st.integers(0, len(where) - 1))]
                container[key] = copy.deepcopy(other.get(at) if isinstance(other, dict) else other)
            case _:
                container[key] = copy.deepcopy(draw(HOSTILE))
    return holder[0]


EXAMPLES = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])


@EXAMPLES
@given(mutations(DOCUMENT))
def test_any_change_of_a_manifest_is_read_or_refused(document: Any) -> None:
    """A manifest whose digest matches whatever it says makes sense, or is refused by one line of ours."""
    run("manifest", seal_manifest(write_json(document)))


@EXAMPLES
@given(mutations(HEADER))
def test_any_change_of_a_header_is_read_or_refused(header: Any) -> None:
    """The same for a shard's header and what is in it."""
    run("header", write_header(header))


@EXAMPLES
@given(mutations([value for _, value in DOCUMENT["values"]]))
def test_any_change_of_a_value_is_decoded_or_refused(values: Any) -> None:
    """Typed JSON decodes to something that can be saved again, or is refused; torch's types too."""
    try:
        encoded = json.loads(write_json(values))
    except (ValueError, RecursionError):
        return
    message = ""
    try:
        CODEC.encode(CODEC.decode(encoded), "values")
    except CheckpointError as e:
        message = str(e)
    assert len(message) < 1000


@settings(EXAMPLES, max_examples=60)
@given(mutations(PARTS))
def test_any_change_of_a_checkpoint_is_read_or_refused(parts: Any) -> None:
    """Opening, verifying and reading give every byte of what is asked for, or an error of ours."""
    run("checkpoint", json.dumps(parts).encode())


@settings(EXAMPLES)
@given(st.randoms(use_true_random=False), st.sampled_from(["manifest", "header"]))
def test_any_change_of_bytes_is_read_or_refused(random: Any, target: str) -> None:
    """Flipped, lost, doubled and foreign bytes, in the text that the digest or the length is of."""
    if target == "manifest":
        run(target, seal_manifest(fuzz.mutate_bytes(write_json(DOCUMENT), random)))
    else:
        run(target, seal_header(fuzz.mutate_bytes(write_header(HEADER)[8:].rstrip(), random)))


# --- JSON that means more than one thing, or nothing ---


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"format":"fsdp_ckpt","version":1,"version":1', "stands twice"),
        (b'{"format":"fsdp_ckpt","version":1,"values":[[["v"],{"a":1,"a":2}]]', "stands twice"),
        (b'{"format":"fsdp_ckpt","version":1,"step":NaN', "NaN"),
        (b'{"format":"fsdp_ckpt","version":1,"step":-Infinity', "Infinity"),
        (b'{"format":"fsdp_ckpt","version":1,"step":1e999', "beyond"),
        (b'{"format":"fsdp_ckpt","version":1,"step":' + b"9" * 10_000_000, "not JSON"),
        (
            b'{"format":"fsdp_ckpt","version":1,"step":' + b"[" * 100_000 + b"]" * 100_000,
            "not JSON",
        ),
        (b'{"format":"fsdp_ckpt","version":1,"step":' + b'{"":' * 100_000, "not JSON"),
    ],
)
def test_ambiguous_json_is_refused(text: bytes, words: str) -> None:
    """A key given twice, numbers that are none, and nesting without end, wherever they stand."""
    with bounded(), pytest.raises(CorruptCheckpointError, match=words) as caught:
        Manifest.from_bytes(seal_manifest(text), "manifest.json")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("field", [*DOCUMENT, "version"])
@pytest.mark.parametrize("depth", [250, 500, 800, 950])
def test_depth_that_json_allows_breaks_nothing(field: str, depth: int) -> None:
    """What can just be parsed may be too deep to print, to walk through or to write again."""
    nested = b"[" * (depth + 1) + b"]" * (depth + 1)
    template = write_json(DOCUMENT | {field: "here"})
    assert template.count(b'"here"') == 1
    for place in (nested, b"[" + nested + b"]", b'[[["v"],' + nested + b"]]"):
        run("manifest", seal_manifest(template.replace(b'"here"', place)))


# --- a few bytes that ask for a lot ---


def test_claimed_sizes_reserve_nothing() -> None:
    """Numbers up to 2^63 and beyond are compared, not allocated."""
    for size in (2**31, 2**40, 2**62, 2**63 - 1, 2**63, 2**64, 10**4000):
        refuse_manifest(changed(DOCUMENT, world_size=size), "ranks|count", megabytes=5)
        meshes = [{"shape": [size]}, *DOCUMENT["meshes"][1:]]
        refuse_manifest(changed(DOCUMENT, meshes=meshes), "mesh|count", megabytes=5)
        header = copy.deepcopy(HEADER)
        key = next(key for key in header if key != "__metadata__")
        header[key]["data_offsets"][1] = size
        refuse_header(header, "bytes|count")
    region = write_header(HEADER)
    for length in (0, 2**31, 2**40, 2**63, 2**64 - 1):
        with bounded(megabytes=5), pytest.raises(CorruptCheckpointError, match="length field"):
            ShardHeader.from_bytes(length.to_bytes(8, "little") + region[8:], "shard")


def test_meshes_without_ranks_are_bounded_together() -> None:
    """A mesh of thousands of ranks takes a few characters; a list of such meshes must not fill the memory."""
    num_ranks = 4096
    rows = [[f"a/{rank}.safetensors", 8192, 4096, ""] for rank in range(num_ranks)]
    meshes = [
        {"shape": [1] * (i % 17) + [2] * (i % 12) + [num_ranks >> (i % 12)]} for i in range(9999)
    ]
    document = changed(DOCUMENT, files=rows, world_size=num_ranks, meshes=meshes)
    refuse_manifest(document, "there are")


def test_axes_and_dims_are_few() -> None:
    """A hundred thousand of them would take their square, or the stack."""
    many = 100_000
    meshes = [{"shape": [1] * many, "ranks": [0]}]
    layouts = [{"mesh": 0, "placements": ["S0/2"] * many}]
    rows = [[["w"], "U8", [1], 0, 0]]
    refuse_manifest(changed(DOCUMENT, meshes=meshes, layouts=layouts, tensors=rows), "axes")
    meshes = [{"shape": [1, 1]}]
    for layout in ({"mesh": 0, "flat": [1, 0]}, {"chunks": [[0, [0] * many, [1] * many]]}):
        rows = [[["w"], "U8", [1] * many, 0, 0]]
        refuse_manifest(changed(DOCUMENT, meshes=meshes, layouts=[layout], tensors=rows), "dims")


def staircase(num_steps: int) -> list[Any]:
    """Return chunks that tile a square, so that in either dim each overlaps nearly every other one."""
    right = [[0, [i, i], [1, num_steps - i]] for i in range(num_steps)]
    below = [[0, [i + 1, i], [num_steps - i - 1, 1]] for i in range(num_steps - 1)]
    return right + below


def alone(chunks: list[Any], shape: list[int], num_rows: int = 1) -> Any:
    """Return the document of tensors that share one list of chunks."""
    rows = [[["w", i], "U8", shape, 0, 0] for i in range(num_rows)]
    return changed(
        DOCUMENT, meshes=[], layouts=[{"chunks": chunks}], tensors=rows, inline={}, values=[]
    )


def test_chunks_laid_out_to_be_slow_are_proven_quickly() -> None:
    """Coverage takes as long as there are chunks, however many of them meet along a dim."""
    n = 10_000
    content = seal_manifest(write_json(alone(staircase(n), [n, n])))
    with bounded():
        Manifest.from_bytes(content, "manifest.json")
    chunks = staircase(n)
    chunks[5][1], chunks[6][1] = chunks[6][1], chunks[5][1]  # as many elements, one twice
    refuse_manifest(alone(chunks, [n, n]), "overlap|outside")


def test_rows_that_share_many_chunks_are_proven_once() -> None:
    """Tensors times chunks is not what a manifest costs."""
    n = 5000
    chunks = [[0, [i], [1]] for i in range(n)]
    content = seal_manifest(write_json(alone(chunks, [n], num_rows=n)))
    with bounded():
        Manifest.from_bytes(content, "manifest.json")
    refuse_manifest(alone([[0, [0], [0]]], [0], num_rows=n), "empty")


def test_keys_made_to_collide_are_refused() -> None:
    """Ints of one hash would make a table of n keys cost n * n."""
    n = 5_000
    large = [i * PRIME for i in range(n)]
    for paths in ([["v", i] for i in large], [["v", i, f"x{i}"] for i in large]):
        values = [[path, 0] for path in paths]
        refuse_manifest(changed(DOCUMENT, values=values), "collide|beyond 64 bits")
        refuse_manifest(changed(DOCUMENT, rank_local=paths), "collide|beyond 64 bits")
        header = copy.deepcopy(HEADER)
        header["__metadata__"]["fsdp_ckpt"]["values"] = values
        refuse_header(header, "collide|beyond 64 bits")
    pairs = [[i, 0] for i in large]
    for value in (
        *({"$": tag, "v": large} for tag in ("set", "frozenset")),
        *({"$": tag, "v": pairs} for tag in ("dict", "OrderedDict", "Counter")),
        {"$": "defaultdict", "factory": "int", "v": pairs},
        {"$": "set", "v": [{"$": "tuple", "v": [i]} for i in large]},
    ):
        with bounded(), pytest.raises(CorruptCheckpointError, match="collide"):
            CODEC.decode(value)


def test_keys_that_happen_to_be_large_are_fine() -> None:
    """Ids and hashes as keys are what programs have; they are refused only in numbers that collide."""
    for keys in ([i * PRIME for i in range(900)], [2**100 + 3 * i for i in range(50_000)]):
        encoded = CODEC.encode({"ids": set(keys), "by id": dict.fromkeys(keys, 0)}, "value")
        assert CODEC.decode(encoded) == {"ids": set(keys), "by id": dict.fromkeys(keys, 0)}


@pytest.mark.parametrize("num_rows", [20_000])
def test_a_great_many_rows_take_time_in_proportion(num_rows: int) -> None:
    """A manifest with rows that are all refused or all fine costs what JSON of its size costs."""
    rows = [[["w", str(i)], "U8", [1], 0, 0] for i in range(num_rows)]
    document = changed(alone([[0, [0], [1]]], [1]), tensors=rows)
    content = seal_manifest(write_json(document))
    with bounded(megabytes=40 * len(content) / MB):
        assert len(Manifest.from_bytes(content, "manifest.json").tensors) == num_rows
    document["tensors"] = rows + rows[:1]
    refuse_manifest(document, "same name", megabytes=40 * len(content) / MB)


# --- typed JSON ---


@pytest.mark.parametrize(
    "value",
    [
        {"$": "x" * MB},
        {"$": ["list"]},
        {"$": "enum", "type": "os:" + "x" * MB, "v": "x"},
        {"$": "enum", "type": "os:environ", "v": "HOME"},
        {"$": "enum", "type": "http:HTTPStatus", "v": "__class__"},
        {"$": "ndarray", "dtype": "<f4", "shape": [2**62], "v": ""},
        {"$": "ndarray", "dtype": "<f4", "shape": [1] * 100_000, "v": "AAAAAA=="},
        {"$": "ndarray", "dtype": "<U999999999", "shape": [1], "v": ""},
        {"$": "ndarray", "dtype": "|O", "shape": [1], "v": "AAAAAAAAAAA="},
        {"$": "ndarray", "dtype": "f4,f4", "shape": [1], "v": "AAAAAAAAAAA="},
        {"$": "deque", "v": [], "maxlen": 2**70},
        {"$": "range", "v": [0, 10, 0]},
        {"$": "int", "v": "os.system"},
        {"$": "defaultdict", "factory": "eval", "v": []},
        {"$": "set", "v": [{"$": "dict", "v": []}]},
        {"$": "torch.device", "v": "cuda:" + "9" * 40},
        {"$": "torch.dtype", "v": "torch.__builtins__"},
    ],
)
def test_hostile_values_are_refused(value: Any) -> None:
    """Nothing that a value names is run, built or reserved."""
    with bounded(megabytes=20), pytest.raises(CorruptCheckpointError) as caught:
        CODEC.decode(value)
    assert len(str(caught.value)) < 1000


# --- shard headers ---


def entry_change(change: Callable[[dict[str, Any], list[Any]], Any]) -> Any:
    """Return the header with a change to its first entry, as safetensors and as we describe it."""
    header = copy.deepcopy(HEADER)
    entries = header["__metadata__"]["fsdp_ckpt"]["entries"]
    key = next(key for key, row in entries.items() if row[2] and header[key]["shape"])
    change(header[key], entries[key])
    return header


def test_chunks_outside_of_their_tensor_are_refused() -> None:
    """A chunk's offsets and sizes stay within the tensor's shape, also where their sum is beyond 64 bits."""
    for offset in (1, 2**31, 2**62):
        header = entry_change(
            lambda _, row, offset=offset: row[3].__setitem__(0, offset + row[2][0])
        )
        refuse_header(header, "outside")


def test_entries_that_are_not_described_are_refused() -> None:
    """What other programs read of the file is what we read of it."""
    header = copy.deepcopy(HEADER)
    header["stowaway"] = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
    refuse_header(header, "described")


def test_a_great_many_entries_take_time_in_proportion() -> None:
    """Headers of thousands of entries, all at one place or one behind the other."""
    n = 5_000
    for step, words in ((0, "overlaps"), (1, None)):
        header = copy.deepcopy(HEADER)
        about = header["__metadata__"]["fsdp_ckpt"]
        header = {"__metadata__": header["__metadata__"]} | {
            f"w{i}": {"dtype": "U8", "shape": [1], "data_offsets": [i * step, i * step + 1]}
            for i in range(n)
        }
        about["entries"] = {f"w{i}": [["w", i], "U8", [1], [0], "own"] for i in range(n)}
        about["digests"]["blocks"] = "0" * 16
        if words:
            refuse_header(header, words)
        else:
            region = write_header(header)
            with bounded(megabytes=40 * len(region) / MB):
                assert len(ShardHeader.from_bytes(region, "shard").own) == n


def test_paths_are_shown_whatever_they_are() -> None:
    """A path that is none is refused without printing it."""
    deep: Any = []
    for _ in range(900):
        deep = [deep]
    for path in (
        deep,
        [deep],
        [[0, deep]],
        {"a": deep},
        [None] * MB,
        base64,
        "x" * MB,
        [True],
        [[-1]],
    ):
        with pytest.raises(CorruptCheckpointError) as caught:
            path_from_json(path)
        assert len(str(caught.value)) < 200


def test_the_golden_checkpoint_is_what_the_changes_start_from() -> None:
    """The parts put together again are accepted, so that what is refused is the change."""
    assert Manifest.from_bytes(seal_manifest(write_json(DOCUMENT)), "manifest.json")
    for header in PARTS["headers"].values():
        region = write_header(header)
        assert read_header(region) == header
        ShardHeader.from_bytes(region, "shard")
