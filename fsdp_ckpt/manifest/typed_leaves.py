"""Values without members, as typed JSON: floats that are no numbers, numpy's arrays and scalars, enums.

Invariant: as in :mod:`fsdp_ckpt.manifest.typed_json`. No dtype's name is evaluated, and no class is imported.
"""

from __future__ import annotations

import base64
import enum
import re
import struct
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from fsdp_ckpt.errors import CorruptCheckpointError, UnencodableStateError

__all__ = [
    "decode_array",
    "decode_enum",
    "encode_array",
    "encode_enum",
    "encode_float",
    "typed",
]

_DTYPE = re.compile(r"[<>|][biufcmMSUV][1-9]\d{0,8}(\[\d{0,9}[a-zA-Z]{1,7}\])?", re.ASCII)


def encode_float(value: float) -> Any:
    """Return the fields of a float of any bits."""
    # NaNs keep their payload, so a float is its eight bytes.
    return {"$": "float", "v": struct.pack(">d", value).hex()}


def encode_array(array: np.ndarray, key: str) -> dict[str, Any]:
    """Return the fields of an array; ``key`` names it in the error."""
    # Dtypes of other libraries call themselves raw bytes, and would come back as those.
    if _DTYPE.fullmatch(array.dtype.str) is None or np.dtype(array.dtype.str) != array.dtype:
        raise UnencodableStateError(
            f"{key}: a numpy array of dtype {array.dtype} cannot be saved; use a plain dtype",
            key=key,
        )
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"dtype": array.dtype.str, "shape": list(array.shape), "v": data}


def decode_array(fields: Mapping[str, Any]) -> np.ndarray:
    """Return the array of such fields."""
    # numpy evaluates what stands in some dtype strings.
    if _DTYPE.fullmatch(typed(fields["dtype"], str)) is None:
        raise CorruptCheckpointError(f"dtype {fields['dtype'][:40]!r} in typed JSON")
    data = bytearray(base64.b64decode(fields["v"], validate=True))
    shape = [typed(n, int) for n in fields["shape"]]
    if min(shape, default=0) < 0:
        raise CorruptCheckpointError(f"array of shape {str(shape)[:80]} in typed JSON")
    return np.frombuffer(data, dtype=np.dtype(fields["dtype"])).reshape(shape)


def typed(value: Any, kind: type) -> Any:
    """Return ``value`` if it is of exactly this type."""
    if type(value) is not kind:
        raise CorruptCheckpointError(
            f"typed JSON holds {type(value).__name__} where {kind.__name__} is due"
        )
    return value


def encode_enum(value: enum.Enum, key: str) -> dict[str, Any]:
    """Return the fields of a member of an enum; ``key`` names it in the error."""
    kind = type(value)
    name = f"{kind.__module__}:{kind.__qualname__}"
    # A class inside a function cannot be found again; flags that are combined have no name.
    if _find_enum(name) is not kind or value.name not in kind.__members__:
        raise UnencodableStateError(
            f"{key}: {value!r} is no member of an enum at the top level of a module; save its value",
            key=key,
        )
    return {"type": name, "v": value.name}


def decode_enum(fields: Mapping[str, Any]) -> enum.Enum:
    """Return the member, if the program has imported its class."""
    kind = _find_enum(typed(fields["type"], str))
    if kind is None:
        raise CorruptCheckpointError(
            f"enum {fields['type'][:100]} is not defined in this program; import it before loading"
        )
    return kind.__members__[fields["v"]]


def _find_enum(name: str) -> type[enum.Enum] | None:
    # Only a class that the program has already imported: data never causes an import.
    module_name, _, qualname = name.partition(":")
    target: Any = sys.modules.get(module_name)
    for part in qualname.split("."):
        target = vars(target).get(part) if target is not None else None
    return target if isinstance(target, type) and issubclass(target, enum.Enum) else None
