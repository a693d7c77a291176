"""How far two arrays of stored elements are apart.

Invariant: equal bits are equal, so a NaN equals itself and -0.0 is not 0.0. Of elements that differ, the
distance is computed exactly for integers and in float64 for the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fsdp_ckpt.hf.cast import FLOATING, Bits, decode

__all__ = ["Distance", "distance"]

_INTEGERS = {"I8", "I16", "I32", "I64"}
_NUMBERS = {*FLOATING, *_INTEGERS, "U8", "U16", "U32", "U64", "BOOL"}
_COMPLEX = {"C64": "<c8", "C128": "<c16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """Of two arrays; two of parts add up to that of the whole.

    Args:
        num_elements: Of each array.
        num_differing: Elements whose bits differ; of two dtypes, whose numbers do.
        num_non_finite: Those of them of which one is infinite or no number: the distances leave them out.
        max_abs: Largest distance.
        sum_squares: Of the distances.
        has_numbers: Whether the dtypes are ones whose numbers are known here.
    """

    num_elements: int = 0
    num_differing: int = 0
    num_non_finite: int = 0
    max_abs: float = 0.0
    sum_squares: float = 0.0
    has_numbers: bool = True

    def __add__(self, other: Distance) -> Distance:
        return Distance(
            num_elements=self.num_elements + other.num_elements,
            num_differing=self.num_differing + other.num_differing,
            num_non_finite=self.num_non_finite + other.num_non_finite,
            max_abs=max(self.max_abs, other.max_abs),
            sum_squares=self.sum_squares + other.sum_squares,
            has_numbers=self.has_numbers and other.has_numbers,
        )

    @property
    def rms(self) -> float:
        """Root of the mean square of the distances, over all elements."""
        return math.sqrt(self.sum_squares / max(self.num_elements, 1))


def distance(a: Bits, a_dtype: str, b: Bits, b_dtype: str) -> Distance:
    """Compare two arrays.

    Args:
        a: Stored bytes, shape (elements, bytes per element), contiguous.
        a_dtype: Name of format version 1.
        b: As ``a``, as many elements.
        b_dtype: Of ``b``.
    """
    num_elements = len(a)
    if a_dtype == b_dtype:
        a, b = _differing(a, b)
        if not len(a):
            return Distance(num_elements=num_elements)
    known = all(dtype in _NUMBERS or dtype in _COMPLEX for dtype in (a_dtype, b_dtype))
    if not known:
        return Distance(num_elements=num_elements, num_differing=len(a), has_numbers=False)
    return _measure(a, a_dtype, b, b_dtype, num_elements)


def _differing(a: Bits, b: Bits) -> tuple[Bits, Bits]:
    """Return the elements of which the bits differ, as bytes."""
    size = a.shape[1]
    if size not in (1, 2, 4, 8):
        rows = np.flatnonzero((a != b).any(axis=1))
        return a[rows], b[rows]
    # As one number each: rows of bytes are slow to compare and to choose.
    x, y = a.view(f"<u{size}")[:, 0], b.view(f"<u{size}")[:, 0]
    at = np.flatnonzero(x != y)
    return x[at].view(np.uint8).reshape(-1, size), y[at].view(np.uint8).reshape(-1, size)


def _measure(a: Bits, a_dtype: str, b: Bits, b_dtype: str, num_elements: int) -> Distance:
    with np.errstate(all="ignore"):
        if a_dtype == b_dtype and a_dtype not in FLOATING and a_dtype not in _COMPLEX:
            apart = _integers_apart(a, a_dtype, b)
            num_differing = len(a)
        else:
            x, y = _numbers(a, a_dtype), _numbers(b, b_dtype)
            apart = np.abs(x - y)
            same = (x == y) | (np.isnan(x) & np.isnan(y))
            num_differing = len(a) if a_dtype == b_dtype else int(np.count_nonzero(~same))
            if a_dtype != b_dtype:
                apart = np.where(same, 0.0, apart)
    finite = apart[np.isfinite(apart)]
    return Distance(
        num_elements=num_elements,
        num_differing=num_differing,
        num_non_finite=len(apart) - len(finite),
        max_abs=float(finite.max(initial=0.0)),
        sum_squares=float(np.square(finite).sum()),
    )


def _integers_apart(a: Bits, dtype: str, b: Bits) -> Bits:
    """Return distances that are exact up to the rounding of the result: none overflows."""
    size = a.shape[1]
    kind = f"<i{size}" if dtype in _INTEGERS else f"<u{size}"
    x, y = a.view(kind)[:, 0], b.view(kind)[:, 0]
    high, low = np.maximum(x, y), np.minimum(x, y)
    # Modulo 2**bits the difference of two of them is their distance.
    apart: Bits = high.view(f"<u{size}") - low.view(f"<u{size}")
    return apart.astype(np.float64)


def _numbers(stored: Bits, dtype: str) -> Bits:
    """Return the elements as float64, or as complex numbers."""
    if dtype in _COMPLEX:
        return stored.view(_COMPLEX[dtype])[:, 0].astype(np.complex128)
    size = stored.shape[1]
    if dtype in FLOATING:
        return decode(stored.view(f"<u{size}")[:, 0], dtype).astype(np.float64)
    kind = f"<i{size}" if dtype in _INTEGERS else f"<u{size}"
    return stored.view(kind)[:, 0].astype(np.float64)
