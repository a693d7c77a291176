"""Typed JSON: what goes in comes out, and nothing that goes in from storage can do harm."""

from __future__ import annotations

import base64
import collections
import copy
import datetime
import enum
import functools
import json
import math
import pathlib
import re
import struct
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy._core._rational_tests import rational  # a dtype that numpy did not define

from fsdp_ckpt.errors import CorruptCheckpointError, UnencodableStateError
from fsdp_ckpt.manifest.typed_json import MAX_DEPTH, Codec, Extension

CODEC = Codec()


class Color(enum.Enum):
    RED = 1
    CRIMSON = 1
    BLUE = "b"


class Level(enum.IntEnum):
    LOW = 0
    HIGH = 10


class Right(enum.Flag):
    READ = 1
    WRITE = 2


class Outer:
    class Inner(enum.StrEnum):
        A = "a"


Point = collections.namedtuple("Point", "x y")


def float_of(bits: int) -> float:
    return float(struct.unpack(">d", bits.to_bytes(8, "big"))[0])


def exact(value: Any) -> Any:
    """Return something that is equal only where type, order and every bit of ``value`` are equal."""
    kind = type(value)
    if kind is float:
        return kind, struct.pack(">d", value)
    if kind is complex:
        return kind, struct.pack(">dd", value.real, value.imag)
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.char in "gG":  # of which some bytes are padding
            return kind, value.shape, repr(value)
        return kind, value.dtype.str, value.shape, np.asarray(value).tobytes()
    if isinstance(value, dict):
        factory = getattr(value, "default_factory", None)
        return kind, factory, [(exact(k), exact(v)) for k, v in value.items()]
    if kind in (set, frozenset):
        return kind, sorted((exact(v) for v in value), key=repr)
    if kind is collections.deque:
        return kind, value.maxlen, [exact(v) for v in value]
    if kind in (list, tuple):
        return kind, [exact(v) for v in value]
    return kind, value


def through_json(value: Any, codec: Codec = CODEC) -> Any:
    """Encode, write, read, decode."""
    return codec.decode(json.loads(json.dumps(codec.encode(value, "k"), allow_nan=False)))


DTYPES = [
    "?", "i1", "u1", "<i2", ">i2", "<u2", "<i4", ">u4", "<i8", ">i8", "<u8", "<f2", ">f2", "<f4", "<f8",
    ">f8", "<c8", ">c16", "<U3", ">U3", "S3", "V5", "<M8[ns]", "<M8[25s]", "<m8[D]", "<M8",
]  # fmt: skip


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    """Draw an array of any dtype, bytes, shape and memory order."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    size = math.prod(shape)
    if dtype.kind in "bU":  # of which not all bytes are values
        parts = st.booleans() if dtype.kind == "b" else st.text("aé€", max_size=3)
        array = np.array(draw(st.lists(parts, min_size=size, max_size=size)), dtype).reshape(shape)
    else:
        num_bytes = size * dtype.itemsize
        data = draw(st.binary(min_size=num_bytes, max_size=num_bytes))
        array = np.frombuffer(data, dtype).reshape(shape)
    return draw(
        st.sampled_from([array, np.asfortranarray(array), array[..., ::-1] if shape else array])
    )


SCALARS = st.builds(
    lambda array: array.reshape(-1)[0],
    arrays().filter(lambda a: a.size and not (a.dtype.kind in "US" and a.tobytes().count(b"\0"))),
)
HASHABLE = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False),
        st.text(),
        st.binary(max_size=9),
        st.sampled_from([*Color, *Level, *Outer.Inner, Right.READ]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(tuple), st.frozensets(inner, max_size=3)
    ),
    max_leaves=4,
)
KEYS = st.one_of(st.text(), st.sampled_from(["$", "v", "$dict"]))
BITS = st.integers(0, 2**64 - 1)
LEAVES = st.one_of(
    HASHABLE,
    st.integers(-(2**70), 2**70),
    BITS.map(float_of),
    st.builds(complex, BITS.map(float_of), BITS.map(float_of)),
    st.binary(max_size=9).map(bytearray),
    st.builds(range, st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 3)),
    st.sets(HASHABLE, max_size=3),
    st.dictionaries(HASHABLE, st.integers(), max_size=3).map(collections.Counter),
    arrays(),
    SCALARS,
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(collections.deque),
        st.lists(inner, max_size=3).map(lambda v: collections.deque(v, maxlen=len(v))),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(HASHABLE, inner, max_size=3),
        st.dictionaries(HASHABLE, inner, max_size=3).map(collections.OrderedDict),
        st.builds(
            collections.defaultdict,
            st.sampled_from([None, int, float, str, bool, list, dict, set, tuple]),
            st.dictionaries(HASHABLE, inner, max_size=3),
        ),
    ),
    max_leaves=6,
)


@settings(deadline=None)
@given(VALUES)
def test_values_come_back_as_what_they_were(value: Any) -> None:
    """Any nesting of the vocabulary keeps its types, its order and its bits, through the text of JSON."""
    before = exact(value)
    assert exact(through_json(value)) == before
    assert exact(value) == before


@pytest.mark.parametrize(
    "value",
    [
        0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan, float_of(0x7FF8000000000001),
        float_of(0xFFF0000000000001), 5e-324, 1.7976931348623157e308, 0.1,
    ],
)  # fmt: skip
def test_floats_keep_every_bit(value: float) -> None:
    """The sign of zero and the payload of NaN survive, alone and as parts."""
    for whole in (
        value,
        [value],
        {"k": value},
        {value: 1},
        complex(value, -0.0),
        complex(0.0, value),
    ):
        assert exact(through_json(whole)) == exact(whole)


@pytest.mark.parametrize(
    "value",
    [2**63, -(2**64), 10**4000, 10**5000, -(10**5000), 2**4096, 1 - 2**4097],
    ids=lambda value: f"{value.bit_length()} bits",
)
def test_integers_of_any_size_come_back(value: int) -> None:
    """Also those that Python refuses to print."""
    assert through_json(value) == value
    assert through_json({"k": [(value,)]}) == {"k": [(value,)]}


@pytest.mark.parametrize(
    "value",
    [
        np.bool_(True), np.int8(-1), np.uint64(2**64 - 1), np.float16(0.1), np.float32(-0.0), np.float64(0.1),
        np.longdouble(1) / 3, np.complex64(1 - 2j), np.clongdouble(1j), np.str_("é"), np.str_(""),
        np.bytes_(b"\xff"), np.bytes_(b""), np.datetime64("2026-01-31T09:30"), np.datetime64("NaT"),
        np.timedelta64(3, "s"), np.void(b"abc"), np.float64("nan"),
    ],
)  # fmt: skip
def test_numpy_scalars_stay_scalars(value: Any) -> None:
    """A numpy scalar is not a Python number, nor an array of no dimensions."""
    back = through_json(value)
    assert exact(back) == exact(value)
    assert not isinstance(back, np.ndarray)
    assert exact(through_json(np.asarray(value))) == exact(np.asarray(value))


def test_arrays_come_back_writable_and_their_own() -> None:
    """A decoded array shares nothing with the one that was encoded."""
    array = np.arange(6, dtype=">i4").reshape(2, 3)
    array.setflags(write=False)
    back = through_json(array)
    back[0, 0] = 7
    assert array[0, 0] == 0


def test_containers_stay_apart() -> None:
    """Empty containers, containers of equal content, and dicts that look like markers keep their kinds."""
    for value in (
        {}, [], (), set(), frozenset(), "", b"", bytearray(), {"a": {"b": {}}}, [[[]]], ((),), range(0),
        {"$": 1}, {"$": "tuple", "v": []}, {"a": {"$": {"$": None}}}, {1: "int", "1": "str"}, {True: 3},
        {(1, ("a", None)): [1]}, collections.OrderedDict(b=1, a=2), collections.Counter("abca"),
        collections.defaultdict(list, a=[1]), collections.defaultdict(None, a=1),
        collections.deque([1, 2], maxlen=2), collections.deque(), range(9, 0, -2),
    ):  # fmt: skip
        assert exact(through_json(value)) == exact(value)


def test_enums_come_back_as_the_member() -> None:
    """A member of an enum of the program is that very object; an alias is its member."""
    for member in (Color.RED, Color.CRIMSON, Level.HIGH, Outer.Inner.A, Right.WRITE, re.IGNORECASE):
        assert through_json(member) is member
        assert through_json({member: [member]}) == {member: [member]}


def test_equal_sets_look_equal() -> None:
    """What a set was built from, and in what order, does not show: ranks compare encoded values."""
    assert list({0, 8}) != list({8, 0})
    assert CODEC.encode({0, 8}, "k") == CODEC.encode({8, 0}, "k")
    nested = [{frozenset({0, 8}), "a", 1, None}, {1, None, "a", frozenset({8, 0})}]
    assert CODEC.encode(nested[0], "k") == CODEC.encode(nested[1], "k")


class LocalList(list):  # type: ignore[type-arg]
    pass


def make_local_enum() -> enum.Enum:
    class Local(enum.Enum):
        A = 1

    return Local.A


@pytest.mark.parametrize(
    "value",
    [
        object(),
        lambda: 0,
        int,
        sys,
        Point(1, 2),
        LocalList(),
        memoryview(b""),
        slice(1),
        datetime.datetime(2026, 1, 31),
        pathlib.PurePosixPath("a"),
        functools.partial(int),
        iter([]),
        collections.ChainMap(),
        collections.defaultdict(lambda: 0),
        collections.defaultdict(functools.partial(int)),
        collections.defaultdict(complex),
        Right.READ | Right.WRITE,
        Right(0),
        make_local_enum(),
        np.array([None]),
        np.array([(1, 2.0)], dtype="i4,f4"),
        np.array([(1, 2.0)], dtype="i4,f4")[0],
        np.ma.masked_array([1], [True]),
        np.array(["a"], dtype=np.dtypes.StringDType()),
        np.array([rational(1, 2)]),
        np.zeros(3, "V0"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_values_are_refused_by_key(value: Any) -> None:
    """What would need pickle, or would come back as something else, is named with its place."""
    with pytest.raises(UnencodableStateError) as caught:
        CODEC.encode(value, "model")
    assert caught.value.key == "model"
    assert str(caught.value).startswith("model: ")
    for state, key in (
        ({"a": [0, {"b": value}]}, "state.a[1].b"),
        ({7: (value,)}, "state.7[0]"),
        (collections.deque([collections.OrderedDict(x=value)]), "state[0].x"),
        (collections.defaultdict(list, y=value), "state.y"),
    ):
        with pytest.raises(UnencodableStateError) as caught:
            CODEC.encode(state, "state")
        assert caught.value.key == key


def test_keys_are_refused_like_values() -> None:
    """A dict key outside the vocabulary is named by the dict."""
    with pytest.raises(UnencodableStateError) as caught:
        CODEC.encode({"a": {object: 1}}, "state")
    assert caught.value.key == "state.a.<key>"


def nest(levels: int, wrap: Callable[[Any], Any]) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = wrap(value)
    return value


@pytest.mark.parametrize(
    "wrap",
    [
        lambda v: [v],
        lambda v: (v,),
        lambda v: {"k": v},
        lambda v: {1: v},
        lambda v: collections.OrderedDict(k=v),
        lambda v: collections.defaultdict(None, k=v),
        lambda v: collections.deque([v]),
        lambda v: frozenset([v]),
        lambda v: {"$": (v,)},
    ],
)
def test_depth_has_one_limit_for_both_directions(wrap: Callable[[Any], Any]) -> None:
    """What can be encoded can be decoded; deeper nesting is refused when it is encoded."""
    levels = MAX_DEPTH // 2 if nest(1, wrap) == {"$": (0,)} else MAX_DEPTH
    assert exact(through_json(nest(levels, wrap))) == exact(nest(levels, wrap))
    with pytest.raises(UnencodableStateError, match="nested deeper"):
        CODEC.encode(nest(levels + 1, wrap), "k")


def test_containers_that_hold_themselves_are_refused() -> None:
    """A cycle ends in an error, and at once, however many ways lead around it."""
    loop: list[Any] = []
    loop += [loop, loop]
    ring: dict[str, Any] = {}
    ring["a"] = (ring, ring)
    around: collections.deque[Any] = collections.deque()
    around.append({1: around})
    for value in (loop, ring, around):
        with pytest.raises(UnencodableStateError, match="containing itself"):
            CODEC.encode(value, "k")


def test_a_room_can_add_a_type() -> None:
    """An extension decides first; without it, its tag is unknown."""
    extension = Extension(
        tag="path",
        matches=lambda value: isinstance(value, pathlib.PurePath),
        encode=lambda value, key: {"v": str(value)},
        decode=lambda fields: pathlib.PurePosixPath(fields["v"]),
    )
    codec = Codec([extension])
    value = {"at": [pathlib.PurePosixPath("/a/b")]}
    assert through_json(value, codec) == value
    with pytest.raises(CorruptCheckpointError, match="unknown type 'path'"):
        CODEC.decode(codec.encode(value, "k"))
    for broken in ({"$": "path"}, {"$": "path", "v": 3}):
        with pytest.raises(CorruptCheckpointError):
            codec.decode(broken)


def test_decoding_imports_nothing() -> None:
    """An enum of a module that is not loaded is refused, and the module stays unloaded."""
    name = "this"  # prints a poem when it is imported
    assert name not in sys.modules
    with pytest.raises(CorruptCheckpointError, match="not defined in this program"):
        CODEC.decode({"$": "enum", "type": f"{name}:s", "v": "A"})
    assert name not in sys.modules


def encoded_array(dtype: Any, shape: Any, data: bytes = b"") -> dict[str, Any]:
    return {"$": "ndarray", "dtype": dtype, "shape": shape, "v": base64.b64encode(data).decode()}


@pytest.mark.parametrize(
    "encoded",
    [
        {"$": "no such tag"},
        {"$": None},
        {"$": ["tuple"]},
        {"$": {}},
        {"$": "tuple"},
        {"$": "tuple", "v": "abc"},
        {"$": "tuple", "v": {"a": 1}},
        {"$": "set", "v": [[]]},
        {"$": "set", "v": [{"$": "bytearray", "v": ""}]},
        {"$": "dict", "v": [[1]]},
        {"$": "dict", "v": [[1, 2, 3]]},
        {"$": "dict", "v": [[{}, 1]]},
        {"$": "dict", "v": 5},
        {"$": "OrderedDict", "v": [[[], 1]]},
        {"$": "Counter", "v": None},
        {"$": "defaultdict", "factory": "eval", "v": []},
        {"$": "defaultdict", "factory": ["int"], "v": []},
        {"$": "defaultdict", "v": []},
        {"$": "deque", "v": [], "maxlen": -1},
        {"$": "deque", "v": [], "maxlen": 2**70},
        {"$": "deque", "v": [], "maxlen": "1"},
        {"$": "bytes", "v": "é"},
        {"$": "bytes", "v": "a"},
        {"$": "bytes", "v": 7},
        {"$": "bytearray", "v": None},
        {"$": "float", "v": "7ff"},
        {"$": "float", "v": "zz"},
        {"$": "complex", "v": "0" * 16},
        {"$": "int", "v": "x"},
        {"$": "int", "v": 7},
        {"$": "range", "v": [0, 1, 0]},
        {"$": "range", "v": [0.0]},
        {"$": "range", "v": [True]},
        {"$": "range", "v": []},
        {"$": "enum", "type": "os:system", "v": "A"},
        {"$": "enum", "type": "os:path.join", "v": "A"},
        {"$": "enum", "type": "enum:Enum", "v": "A"},
        {"$": "enum", "type": "enum:Enum", "v": []},
        {"$": "enum", "type": 3, "v": "A"},
        {"$": "enum", "type": f"{__name__}:Color", "v": "GREEN"},
        {"$": "enum", "type": f"{__name__}:Color", "v": "__class__"},
        {"$": "enum", "type": f"{__name__}:CODEC.encode", "v": "A"},
        encoded_array("|O", [0]),
        encoded_array("O8", [1], bytes(8)),
        encoded_array("i4,i4", [1], bytes(8)),
        encoded_array("(2,)i4", [1], bytes(8)),
        encoded_array(",", []),
        encoded_array("i4,,", []),
        encoded_array("<f4", [-1], bytes(8)),
        encoded_array("<f4", [3], bytes(8)),
        encoded_array("<f4", [1], bytes(3)),
        encoded_array("<f4", [2**70]),
        encoded_array("<f4", [2**40, 2**40]),
        encoded_array("<f4", [1.0], bytes(4)),
        encoded_array("<f4", "1", bytes(4)),
        encoded_array("<M8[fortnight]", [0]),
        encoded_array(["<f4"], [0]),
        encoded_array("V0", [3]),
        {"$": "scalar", "dtype": "<f4", "shape": [2], "v": base64.b64encode(bytes(8)).decode()},
    ],
)
def test_malformed_values_are_damage(encoded: Any) -> None:
    """Whatever is wrong with a marker is reported as damage, also deep inside a value."""
    for whole in (encoded, [encoded], {"a": {"b": encoded}}, {"$": "tuple", "v": [encoded]}):
        with pytest.raises(CorruptCheckpointError):
            CODEC.decode(whole)


def test_bottomless_nesting_is_damage() -> None:
    """JSON nested beyond any value ends in an error, not in the interpreter's stack."""
    for wrap in (
        lambda v: [v],
        lambda v: {"k": v},
        lambda v: {"$": "tuple", "v": [v]},
        lambda v: {"$": "dict", "v": [[v, v]]},
    ):  # fmt: skip
        with pytest.raises(CorruptCheckpointError):
            CODEC.decode(nest(5000, wrap))


TAGS = [
    "tuple", "set", "frozenset", "deque", "bytes", "bytearray", "complex", "float", "int", "range", "dict",
    "OrderedDict", "Counter", "defaultdict", "enum", "scalar", "ndarray",
]  # fmt: skip
FIELDS = ["$", "v", "maxlen", "factory", "type", "dtype", "shape"]
ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(
        [*TAGS, *DTYPES, "", "AAAAAAAA", "7ff0000000000001", "re:RegexFlag", "IGNORECASE", "int"]
    ),
)
ANY_JSON = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4),
        st.builds(
            lambda tag, fields: {**fields, "$": tag},
            st.sampled_from(TAGS),
            st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4),
        ),
    ),
    max_leaves=10,
)


def places_in(encoded: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key or position) of every part."""
    items: Any = ()
    if isinstance(encoded, dict):
        items = encoded.items()
    elif isinstance(encoded, list):
        items = enumerate(encoded)
    for key, part in list(items):
        yield encoded, key
        yield from places_in(part)


def decode_or_refuse(encoded: Any) -> None:
    message = ""
    try:
        CODEC.decode(encoded)
    except CorruptCheckpointError as e:
        message = str(e)
    assert len(message.splitlines()) <= 1


@settings(deadline=None)
@given(ANY_JSON)
def test_any_json_is_decoded_or_refused(encoded: Any) -> None:
    """No JSON makes decoding raise anything but the error for damage."""
    decode_or_refuse(encoded)


@settings(deadline=None)
@given(VALUES, ANY_JSON, st.randoms(use_true_random=False))
def test_damaged_values_are_decoded_or_refused(value: Any, other: Any, random: Any) -> None:
    """A value of which one part was replaced, or lost, is another value or damage."""
    encoded = CODEC.encode([value], "k")
    container, key = random.choice(list(places_in(encoded)))
    container[key] = copy.deepcopy(other)
    decode_or_refuse(encoded)
    del container[key]
    decode_or_refuse(encoded)
