"""The dtype names of format version 1 and how each lies in a safetensors file."""

from __future__ import annotations

from fsdp_ckpt.errors import CorruptCheckpointError

__all__ = ["FLOATING", "itemsize", "stored_form"]

FLOATING = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0")

# Name in the manifest -> bytes per element. Names are those of safetensors where it has one.
_SAFETENSORS = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
# No safetensors reader knows these: stored as U8 with one more dim, the bytes of an element.
_AS_BYTES = {"F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "F4_E2M1_X2": 1, "C32": 4, "C128": 16}


def itemsize(dtype: str) -> int:
    """Return bytes per element.

    Raises:
        CorruptCheckpointError: The name is not one of format version 1.
    """
    size = _SAFETENSORS.get(dtype) or _AS_BYTES.get(dtype)
    if size is None:
        raise CorruptCheckpointError(f"unknown dtype {dtype!r}")
    return size


def stored_form(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return the dtype and shape under which a chunk stands in the safetensors header."""
    if dtype in _AS_BYTES:
        return "U8", (*shape, itemsize(dtype))
    return dtype, shape
