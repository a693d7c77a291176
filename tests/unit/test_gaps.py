"""A tensor that is not whole: refused by coverage at save, and at load, never zeros."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItemType

from fsdp_ckpt import (
    CorruptCheckpointError,
    ReshardLoadPlanner,
    ShardedStorageReader,
    ShardedStorageWriter,
)
from fsdp_ckpt.manifest.schema import Manifest
from fsdp_ckpt.plan.box import Box
from fsdp_ckpt.plan.layouts import ListedLayout

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

WHOLE = [((0, 0), (2, 4)), ((2, 0), (2, 4))]
BAD = {
    "missing chunk": WHOLE[:1],
    "overlap": [WHOLE[0], ((1, 0), (3, 4))],
    "empty corner": [WHOLE[0], ((2, 0), (2, 3))],
    "overlap that makes up for a gap": [WHOLE[0], ((1, 0), (2, 4))],
}


class Chunks(DefaultSavePlanner):
    """Writes one tensor of shape (4, 4) in given chunks, as a foreign planner may."""

    def __init__(self, chunks: list[Any]) -> None:
        super().__init__()
        self._chunks = chunks

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        (item,) = plan.items
        assert item.tensor_data is not None
        items = []
        for offsets, sizes in self._chunks:
            data = TensorWriteData(
                chunk=ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
                properties=item.tensor_data.properties,
                size=item.tensor_data.size,
            )
            index = MetadataIndex("t", offsets)
            items.append(
                dataclasses.replace(item, index=index, type=WriteItemType.SHARD, tensor_data=data)
            )
        return dataclasses.replace(plan, items=items)

    def resolve_data(self, write_item: Any) -> torch.Tensor:
        chunk = write_item.tensor_data.chunk
        slices = tuple(slice(a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))
        return self.state_dict["t"][slices]


def save(path: Path, chunks: list[Any]) -> None:
    state = {"t": torch.arange(16.0).reshape(4, 4) + 1}
    dcp.save(state, storage_writer=ShardedStorageWriter(path), planner=Chunks(chunks))


def load(path: Path) -> torch.Tensor:
    state = {"t": torch.full((4, 4), -1.0)}
    reader = ShardedStorageReader(path)
    dcp.load(state, storage_reader=reader, planner=ReshardLoadPlanner())
    return state["t"]


def test_whole_chunks_of_a_foreign_planner_come_back(tmp_path: Path) -> None:
    """The planner of these tests saves well where its chunks are whole."""
    save(tmp_path / "c", WHOLE)
    assert load(tmp_path / "c").tolist() == (torch.arange(16.0).reshape(4, 4) + 1).tolist()


@pytest.mark.parametrize("bad", BAD)
def test_a_tensor_that_is_not_whole_is_not_saved(tmp_path: Path, bad: str) -> None:
    """A chunk missing, two overlapping, or an empty corner: the save fails and no checkpoint is there."""
    with pytest.raises(CheckpointException):
        save(tmp_path / "c", BAD[bad])
    assert not (tmp_path / "c" / "manifest.json").exists()


@pytest.mark.parametrize("bad", [*BAD, "chunk in another place"])
def test_a_manifest_that_is_not_whole_is_not_loaded(tmp_path: Path, bad: str) -> None:
    """The same in a manifest, or chunks that its files do not hold: an error, the live tensor untouched."""
    save(tmp_path / "c", WHOLE)
    path = tmp_path / "c" / "manifest.json"
    manifest = Manifest.from_bytes(path.read_bytes(), "manifest")
    chunks = BAD.get(bad, [((0, 0), (1, 4)), ((1, 0), (3, 4))])
    layout = ListedLayout.of((0, Box(*chunk)) for chunk in chunks)
    (row,) = manifest.tensors
    changed = dataclasses.replace(manifest, tensors=(dataclasses.replace(row, layout=layout),))
    path.write_bytes(changed.to_bytes())
    state = {"t": torch.full((4, 4), -1.0)}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(
            state,
            storage_reader=ShardedStorageReader(tmp_path / "c"),
            planner=ReshardLoadPlanner(),
        )
    ((error, _),) = caught.value.failures.values()
    # DCP turns what reading the manifest raises into its own AssertionError, with our words inside.
    assert isinstance(error, CorruptCheckpointError) or "t: " in str(error)
    assert (state["t"] == -1).all()
