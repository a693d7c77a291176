"""The layout of the output: every element once, without gaps, in files of the asked size."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_ckpt import UnencodableStateError
from fsdp_ckpt.hf.layout import OutputTensor, index_of, lay_out_files

shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)
tensors = st.lists(st.tuples(st.sampled_from(["F64", "F32", "BF16", "BOOL"]), shapes), min_size=1)


@given(tensors, st.integers(1, 3000), st.integers(1, 400))
def test_regions_tile_every_file(
    given_tensors: list[tuple[str, tuple[int, ...]]], max_shard_bytes: int, num_wide: int
) -> None:
    """However the data is cut, its regions follow each other without gaps, every element once."""
    tensors = [
        OutputTensor(name=f"t{i}", dtype=dtype, shape=shape)
        for i, (dtype, shape) in enumerate(given_tensors)
    ]
    files = lay_out_files(tensors, max_shard_bytes)
    assert sorted(t.name for f in files for t in f.tensors) == sorted(t.name for t in tensors)
    for file in files:
        position = 0
        held: dict[str, int] = {}
        for start in range(0, file.data_bytes, 8 * num_wide):
            stop = min(start + 8 * num_wide, file.data_bytes)
            for region in file.regions(start, stop):
                assert region.byte_offset == position
                position += region.num_bytes
                shape = region.tensor.shape
                strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
                first = sum(a * s for a, s in zip(region.box.offsets, strides, strict=True))
                assert first == held.get(region.tensor.name, 0)
                held[region.tensor.name] = first + region.box.num_elements
            assert position == stop
        assert position == file.data_bytes
        assert all(held.get(t.name, 0) == math.prod(t.shape) for t in file.tensors)
        assert len(file.header) % 64 == 0
        assert json.loads(file.header[8:]).keys() == {
            "__metadata__",
            *(t.name for t in file.tensors),
        }
    assert (index_of(files) is None) == (len(files) == 1)


def test_names_that_safetensors_reserves_are_refused() -> None:
    """A tensor of this name would vanish from the file."""
    with pytest.raises(UnencodableStateError, match="__metadata__"):
        lay_out_files([OutputTensor(name="__metadata__", dtype="F32", shape=(1,))], 100)
