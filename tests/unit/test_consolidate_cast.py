"""Conversions by numpy give torch's bits, for every number that 16 bits hold and at every edge of 32."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fsdp_ckpt.hf.cast import TARGETS, bits_dtype, cast

TORCH = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def patterns(dtype: str) -> np.ndarray:
    """Return bits: all of them up to 16, else those around each power of two and what is drawn."""
    kind = bits_dtype(dtype)
    if kind.itemsize <= 2:
        return np.arange(2 ** (8 * kind.itemsize), dtype=kind)
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, 2 ** (8 * kind.itemsize) - 1, 20_000, dtype=kind)
    powers = 2.0 ** np.arange(-160, 160)
    near = np.concatenate(
        [powers * (1 + k * 2.0**-p) for p in (8, 9, 11, 12, 24) for k in (-1, 1, 3)]
    )
    values = np.concatenate([near, -near, [0.0, np.inf, -np.inf, 65519.0, 65520.0, 3.3961e38]])
    with np.errstate(over="ignore"):
        return np.concatenate([drawn, values.astype(f"<f{kind.itemsize}").view(kind)])


def as_torch(bits: np.ndarray, dtype: str) -> torch.Tensor:
    signed = torch.from_numpy(bits.view(f"<{'u' if bits.itemsize == 1 else 'i'}{bits.itemsize}"))
    return signed.view(TORCH[dtype])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", TORCH)
def test_every_number_is_torchs(source: str, target: str) -> None:
    """Bit for bit; a NaN is a NaN, and only a finite number that became infinite is counted."""
    bits = patterns(source)
    found, num_infinite = cast(bits, source, target)
    before = as_torch(bits, source).to(torch.float64)
    expected = as_torch(bits, source).to(TORCH[target])
    got = as_torch(np.ascontiguousarray(found), target)
    is_nan = expected.isnan()
    assert torch.equal(got.isnan(), is_nan)
    kind = SIGNED[expected.element_size()]
    assert torch.equal(got.view(kind)[~is_nan], expected.view(kind)[~is_nan])
    if source != target:
        assert num_infinite == int((expected.isinf() & before.isfinite()).sum())


@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_shapes_and_views_stay(shape: tuple[int, ...]) -> None:
    """0-d, empty, and strided views of a larger array."""
    values = np.ones((*shape, 4), "<f4")[..., 1]
    found, _ = cast(values.view("<u4"), "F32", "BF16")
    assert (found.shape, found.dtype) == (shape, np.dtype("<u2"))
    assert (found == 0x3F80).all()
