"""Plain Python values as JSON that comes back as what it was.

Invariant: ``decode(encode(value))`` has the type and the bits of ``value``, and decoding never runs
code: no pickle, no import, no call of anything that the data names. A value outside the vocabulary is
refused with its key when it is encoded.

JSON's own types stand for themselves; everything else is an object with one marker, ``{"$": tag, ...}``.
A room that knows further types (torch's) passes them as :class:`Extension`.
"""

from __future__ import annotations

import base64
import collections
import enum
import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fsdp_ckpt.errors import CorruptCheckpointError, UnencodableStateError
from fsdp_ckpt.manifest.strict_json import brief, refuse_colliding
from fsdp_ckpt.manifest.typed_leaves import (
    decode_array,
    decode_enum,
    encode_array,
    encode_enum,
    encode_float,
    typed,
)

__all__ = ["Codec", "Extension", "Json"]

Json = Any  # JSON has no useful static type: nested dict, list, str, int, float, bool, None.

MAX_DEPTH = 100
# A level of a value takes at most three levels of JSON: an object, its list of pairs, a pair.
MAX_JSON_DEPTH = 3 * MAX_DEPTH + 3
# Ints of 4300 decimal digits and more are what Python refuses to print and to parse.
MAX_PLAIN_INT_BITS = 4096
_FACTORIES: dict[str, Any] = {
    cls.__name__: cls for cls in (int, float, str, bool, list, dict, set, tuple)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """One more type in the vocabulary.

    Args:
        tag: Marker in the JSON; must not be one of the built-in tags.
        matches: Whether this extension encodes a value.
        encode: Value → plain JSON fields (a dict without ``"$"``); the second argument is the value's key.
        decode: The fields → value.
    """

    tag: str
    matches: Callable[[Any], bool]
    encode: Callable[[Any, str], dict[str, Json]]
    decode: Callable[[Mapping[str, Json]], Any]


class Codec:
    """Encoder and decoder for one vocabulary: the built-in types and ``extensions``."""

    def __init__(self, extensions: Iterable[Extension] = ()) -> None:
        self._extensions = {extension.tag: extension for extension in extensions}

    def encode(self, value: Any, key: str) -> Json:
        """Encode ``value``.

        Args:
            value: Any nesting of the vocabulary's types.
            key: Name of the value, for the error.

        Raises:
            UnencodableStateError: A part of it is outside the vocabulary; named by its key.
        """
        return self._encode(value, key, 0)

    def _encode(self, value: Any, key: str, depth: int) -> Json:
        if depth > MAX_DEPTH:
            raise UnencodableStateError(
                f"{key}: nested deeper than {MAX_DEPTH} levels, or containing itself", key=key
            )
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            plain = value.bit_length() <= MAX_PLAIN_INT_BITS
            return value if plain else {"$": "int", "v": hex(value)}
        for extension in self._extensions.values():
            if extension.matches(value):
                return {"$": extension.tag, **extension.encode(value, key)}
        if kind is list:
            if all(type(v) is str for v in value):  # thousands of names
                return list(value)
            return self._encode_items(value, key, depth)
        if kind is dict:
            return self._encode_dict(value, key, depth)
        encoder = _ENCODERS.get(kind)
        if encoder is not None:
            return {"$": kind.__name__, **encoder(self, value, key, depth)}
        if kind is float:
            return value if math.isfinite(value) else encode_float(value)
        if isinstance(value, enum.Enum):
            return {"$": "enum", **encode_enum(value, key)}
        if isinstance(value, np.generic):
            return {"$": "scalar", **encode_array(np.asarray(value), key)}
        if kind is np.ndarray:
            return {"$": "ndarray", **encode_array(value, key)}
        raise UnencodableStateError(
            f"{key}: a value of type {kind.__module__}.{kind.__qualname__} cannot be saved without "
            "pickle; turn it into plain data, tensors or arrays in its state_dict()",
            key=key,
        )

    def _encode_items(self, values: Iterable[Any], key: str, depth: int) -> list[Json]:
        return [self._encode(v, f"{key}[{i}]", depth + 1) for i, v in enumerate(values)]

    def _encode_dict(self, value: Mapping[Any, Any], key: str, depth: int) -> Json:
        if all(type(k) is str for k in value) and "$" not in value:
            return {k: self._encode(v, f"{key}.{k}", depth + 1) for k, v in value.items()}
        return {"$": "dict", **self._encode_pairs(value, key, depth)}

    def _encode_pairs(self, value: Mapping[Any, Any], key: str, depth: int) -> dict[str, Json]:
        return {
            "v": [
                [
                    self._encode(k, f"{key}.<key>", depth + 1),
                    self._encode(v, f"{key}.{k}", depth + 1),
                ]
                for k, v in value.items()
            ]
        }

    def decode(self, encoded: Json) -> Any:
        """Decode what :meth:`encode` made.

        Raises:
            CorruptCheckpointError: Not of the vocabulary, or malformed.
        """
        try:
            return self._decode(encoded, 0)
        except (
            AttributeError, KeyError, OverflowError, RuntimeError, TypeError, ValueError, struct.error,
        ) as e:  # fmt: skip
            if isinstance(e, CorruptCheckpointError):
                raise
            raise CorruptCheckpointError(
                f"malformed typed JSON: {type(e).__name__}: {brief(e)}"
            ) from e

    def _decode(self, encoded: Json, depth: int) -> Any:
        # Each level of a value takes at most two levels of JSON.
        if depth > 2 * MAX_DEPTH + 2:
            raise CorruptCheckpointError(f"typed JSON nested deeper than {MAX_DEPTH} levels")
        if isinstance(encoded, list):
            return [self._decode(v, depth + 1) for v in encoded]
        if not isinstance(encoded, dict):
            return encoded
        if "$" not in encoded:
            return {k: self._decode(v, depth + 1) for k, v in encoded.items()}
        tag = encoded["$"]
        if tag in self._extensions:
            return self._extensions[tag].decode(encoded)
        decoder = _DECODERS.get(tag)
        if decoder is None:
            raise CorruptCheckpointError(f"unknown type {str(tag)[:40]!r} in typed JSON")
        return decoder(self, encoded, depth + 1)


def _decode_pairs(codec: Codec, fields: Mapping[str, Json], depth: int) -> list[tuple[Any, Any]]:
    pairs = [(codec._decode(k, depth + 1), codec._decode(v, depth + 1)) for k, v in fields["v"]]
    refuse_colliding(k for k, _ in pairs)
    return pairs


def _encode_defaultdict(
    codec: Codec, value: collections.defaultdict[Any, Any], key: str, depth: int
) -> dict[str, Json]:
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", None)
    if factory is not None and _FACTORIES.get(str(name)) is not factory:
        raise UnencodableStateError(
            f"{key}: a defaultdict with the factory {factory!r} cannot be saved; use a plain dict",
            key=key,
        )
    return {"factory": name, **codec._encode_pairs(value, key, depth)}


def _decode_defaultdict(codec: Codec, fields: Mapping[str, Json], depth: int) -> Any:
    factory = None if fields["factory"] is None else _FACTORIES[fields["factory"]]
    return collections.defaultdict(factory, _decode_pairs(codec, fields, depth))


def _encode_deque(
    codec: Codec, value: collections.deque[Any], key: str, depth: int
) -> dict[str, Json]:
    return {"v": codec._encode_items(value, key, depth), "maxlen": value.maxlen}


def _items(codec: Codec, value: Iterable[Any], key: str, depth: int) -> dict[str, Json]:
    return {"v": codec._encode_items(value, key, depth)}


def _unordered(codec: Codec, value: Iterable[Any], key: str, depth: int) -> dict[str, Json]:
    # Sorted: the order of a set of strs differs between processes, and equal values must look equal.
    return {"v": sorted(codec._encode_items(value, key, depth), key=json.dumps)}


def _bytes(codec: Codec, value: bytes | bytearray, key: str, depth: int) -> dict[str, Json]:
    return {"v": base64.b64encode(value).decode()}


def _complex(codec: Codec, value: complex, key: str, depth: int) -> dict[str, Json]:
    return {"v": struct.pack(">dd", value.real, value.imag).hex()}


def _range(codec: Codec, value: range, key: str, depth: int) -> dict[str, Json]:
    return {"v": [value.start, value.stop, value.step]}


_Encoder = Callable[[Codec, Any, str, int], dict[str, Json]]
_ENCODERS: dict[type, _Encoder] = {
    tuple: _items,
    set: _unordered,
    frozenset: _unordered,
    collections.deque: _encode_deque,
    bytes: _bytes,
    bytearray: _bytes,
    complex: _complex,
    range: _range,
    collections.OrderedDict: Codec._encode_pairs,
    collections.Counter: Codec._encode_pairs,
    collections.defaultdict: _encode_defaultdict,
}


def _sequence(codec: Codec, fields: Mapping[str, Json], depth: int) -> Sequence[Any]:
    return [codec._decode(v, depth + 1) for v in typed(fields["v"], list)]


def _members(codec: Codec, fields: Mapping[str, Json], depth: int) -> Sequence[Any]:
    members = _sequence(codec, fields, depth)
    refuse_colliding(members)
    return members


_Decoder = Callable[[Codec, Mapping[str, Json], int], Any]
_DECODERS: dict[str, _Decoder] = {
    "tuple": lambda c, f, d: tuple(_sequence(c, f, d)),
    "set": lambda c, f, d: set(_members(c, f, d)),
    "frozenset": lambda c, f, d: frozenset(_members(c, f, d)),
    "deque": lambda c, f, d: collections.deque(_sequence(c, f, d), maxlen=f["maxlen"]),
    "bytes": lambda c, f, d: base64.b64decode(f["v"], validate=True),
    "bytearray": lambda c, f, d: bytearray(base64.b64decode(f["v"], validate=True)),
    "complex": lambda c, f, d: complex(*struct.unpack(">dd", bytes.fromhex(f["v"]))),
    "float": lambda c, f, d: struct.unpack(">d", bytes.fromhex(f["v"]))[0],
    "int": lambda c, f, d: int(typed(f["v"], str), 16),
    "range": lambda c, f, d: range(*(typed(n, int) for n in f["v"])),
    "dict": lambda c, f, d: dict(_decode_pairs(c, f, d)),
    "OrderedDict": lambda c, f, d: collections.OrderedDict(_decode_pairs(c, f, d)),
    "Counter": lambda c, f, d: collections.Counter(dict(_decode_pairs(c, f, d))),
    "defaultdict": _decode_defaultdict,
    "enum": lambda c, f, d: decode_enum(f),
    "scalar": lambda c, f, d: decode_array(f).reshape(())[()],
    "ndarray": lambda c, f, d: decode_array(f),
}
