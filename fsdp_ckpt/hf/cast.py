"""Floating-point conversions by numpy, which knows neither bfloat16 nor float8.

    stored bits --decode--> float32 or float64 --round to nearest, ties to even--> stored bits

Wider than float32 goes through float32 on its way to 16 bits, as in torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fsdp_ckpt.plan.dtypes import FLOATING, itemsize

__all__ = ["FLOATING", "TARGETS", "Bits", "bits_dtype", "cast", "decode"]

Bits = np.ndarray[Any, np.dtype[Any]]  # elements as unsigned integers of their size

TARGETS = ("BF16", "F16", "F32", "F64")


def bits_dtype(dtype: str) -> np.dtype[Any]:
    """Return the unsigned integer that holds an element's bits."""
    return np.dtype(f"<u{itemsize(dtype)}")


def cast(source: Bits, dtype: str, target_dtype: str) -> tuple[Bits, int]:
    """Convert elements; other dtypes than floating-point ones, and equal ones, stay as they are.

    Args:
        source: Bits of any shape; maybe a view.
        dtype: Of ``source``.
        target_dtype: One of ``TARGETS``, or ``dtype``.

    Returns:
        The converted bits, same shape, and how many finite numbers became infinite.
    """
    if dtype == target_dtype:
        return source, 0
    with np.errstate(over="ignore", invalid="ignore"):
        values = decode(source, dtype)
        bits, encoded = _ENCODE[target_dtype](values)
    infinite = np.isinf(encoded)
    num_infinite = int(np.count_nonzero(infinite))
    if num_infinite:
        num_infinite -= int(np.count_nonzero(infinite & np.isinf(values)))
    return bits, num_infinite


def decode(source: Bits, dtype: str) -> Bits:
    """Return the numbers, as float32 or float64, that the bits of a floating-point dtype stand for."""
    return _DECODE[dtype](source)


def _table(exponent_bits: int, mantissa_bits: int, *, has_infinity: bool) -> Bits:
    """Return the 256 values of an 8-bit float with a sign.

    Source: OCP 8-bit Floating Point Specification (OFP8), revision 1.0, section 5.
    """
    codes = np.arange(128)
    exponents, mantissas = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    fractions = mantissas / (1 << mantissa_bits) + (exponents > 0)
    values = fractions * 2.0 ** (np.maximum(exponents, 1) - bias)
    if has_infinity:
        values[exponents == exponents.max()] = np.nan
        values[(exponents == exponents.max()) & (mantissas == 0)] = np.inf
    else:
        values[-1] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)


def _exponent_table() -> Bits:
    """Return the 256 values of a bare exponent. Source: OCP Microscaling Formats (MX), 5.4.1."""
    values = 2.0 ** (np.arange(256) - 127.0)
    values[-1] = np.nan
    return values.astype(np.float32)


_E4M3 = _table(4, 3, has_infinity=False)
_E5M2 = _table(5, 2, has_infinity=True)
_E8M0 = _exponent_table()


def _decode_bf16(bits: Bits) -> Bits:
    return (bits.astype(np.uint32) << 16).view(np.float32)


_DECODE: dict[str, Callable[[Bits], Bits]] = {
    # Not a view: one of a strided array of another width there is not.
    "F64": lambda bits: np.asarray(bits, order="C").view(np.float64),
    "F32": lambda bits: np.asarray(bits, order="C").view(np.float32),
    "F16": lambda bits: np.asarray(bits, order="C").view(np.float16).astype(np.float32),
    "BF16": _decode_bf16,
    "F8_E4M3": lambda bits: _E4M3[bits],
    "F8_E5M2": lambda bits: _E5M2[bits],
    "F8_E8M0": lambda bits: _E8M0[bits],
}


def _encode_bf16(values: Bits) -> tuple[Bits, Bits]:
    single = np.asarray(values, np.float32, order="C")
    bits = single.view(np.uint32)
    # Half of the last kept place, and one less where that place is even; what carries over is the rounding.
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    is_nan = np.isnan(single)
    if (
        is_nan.any()
    ):  # rounding could carry a NaN into an infinity; a quiet one stays a NaN when it is cut
        rounded = np.where(is_nan, bits | np.uint32(0x00400000), rounded)
    kept = rounded & np.uint32(0xFFFF0000)
    return (rounded >> np.uint32(16)).astype(np.uint16), kept.view(np.float32)


def _encode_as(dtype: str) -> Callable[[Bits], tuple[Bits, Bits]]:
    def encode(values: Bits) -> tuple[Bits, Bits]:
        single = values if dtype == "<f8" else values.astype(np.float32, copy=False)
        encoded = single.astype(dtype)
        return encoded.view(f"<u{encoded.itemsize}"), encoded

    return encode


_ENCODE: dict[str, Callable[[Bits], tuple[Bits, Bits]]] = {
    "BF16": _encode_bf16,
    "F16": _encode_as("<f2"),
    "F32": _encode_as("<f4"),
    "F64": _encode_as("<f8"),
}
