"""The layout of the output: every element once, without gaps, in files and windows of the asked size."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_ckpt import UnencodableStateError
from fsdp_ckpt.hf.layout import index_of, lay_out_files
from fsdp_ckpt.manifest.schema import TensorRow
from fsdp_ckpt.plan.layouts import Mesh, MeshLayout, Placement


def row(name: str, dtype: str, shape: tuple[int, ...]) -> TensorRow:
    layout = MeshLayout(Mesh.world(1), (Placement(),))
    return TensorRow(path=("model", name), dtype=dtype, shape=shape, layout=layout)


shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)
tensors = st.lists(st.tuples(st.sampled_from(["F64", "F32", "BF16", "BOOL"]), shapes), min_size=1)


@given(tensors, st.integers(1, 3000), st.integers(8, 3000))
def test_windows_tile_every_file(
    given_tensors: list[tuple[str, tuple[int, ...]]], max_shard_bytes: int, max_bytes: int
) -> None:
    """Regions follow each other without gaps, every element once, no window above its size."""
    rows = [row(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(given_tensors)]
    files = lay_out_files(rows, max_shard_bytes)
    assert sorted(t.name for f in files for t in f.tensors) == sorted(r.name[6:] for r in rows)
    for file in files:
        position = 0
        held: dict[str, int] = {}
        for window in file.windows(max_bytes):
            assert sum(region.num_bytes for region in window) <= max_bytes
            for region in window:
                assert region.byte_offset == position
                position += region.num_bytes
                strides = [
                    math.prod(region.row.shape[d + 1 :]) for d in range(len(region.row.shape))
                ]
                first = sum(a * s for a, s in zip(region.box.offsets, strides, strict=True))
                assert first == held.get(region.row.name, 0)
                held[region.row.name] = first + region.box.num_elements
        assert position == file.data_bytes
        assert all(held.get(t.row.name, 0) == math.prod(t.row.shape) for t in file.tensors)
        header = file.header()
        assert len(header) % 64 == 0
        assert json.loads(header[8:]).keys() == {"__metadata__", *(t.name for t in file.tensors)}
    assert (index_of(files) is None) == (len(files) == 1)


def test_names_that_safetensors_reserves_are_refused() -> None:
    """A tensor of this name would vanish from the file."""
    with pytest.raises(UnencodableStateError, match="__metadata__"):
        lay_out_files([row("__metadata__", "F32", (1,))], 100)
