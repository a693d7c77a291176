"""Roots with small checkpoints: whole, torn, damaged or of another branch, without training anything."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence

import numpy as np

from fsdp_ckpt.commit.catalog import step_folder
from fsdp_ckpt.commit.publish import publish_manifest
from fsdp_ckpt.manifest.schema import FileRow, Manifest, TensorRow, shard_name
from fsdp_ckpt.manifest.shard import ShardHeader
from fsdp_ckpt.plan.box import Box
from fsdp_ckpt.plan.image import BLOCK_BYTES, ImageLayout
from fsdp_ckpt.plan.layouts import Mesh, MeshLayout, Placement
from fsdp_ckpt.storage.shard_io import write_shard
from fsdp_ckpt.storage.store import Store

WORLD_SIZE = 2
SHAPE = (2,)
EPOCH = ("progress", "epoch")
TOKEN = "0123456789ab"
# Where the ids of these tests begin.
START = datetime.datetime(2026, 1, 31, 9, 30, tzinfo=datetime.UTC)


def attempt_at(hours: float, token: str = TOKEN) -> str:
    """Return the id of an attempt that began some hours after ``START``."""
    began = START + datetime.timedelta(hours=hours)
    return f"{began:%Y%m%dT%H%M%S%f}-{token}"


def now_at(hours: float) -> float:
    """Return the seconds since 1970, some hours after ``START``."""
    return START.timestamp() + hours * 3600


def put_checkpoint(
    root: Store,
    step: int,
    *,
    attempt: str | None = None,
    generation: int = 0,
    epoch: int = 0,
    ranks: Sequence[int] = range(WORLD_SIZE),
    publish: bool = True,
) -> Manifest:
    """Write a checkpoint of two ranks, as a save does.

    Args:
        root: The run's root.
        step: Its step.
        attempt: Its id; by default one that began ``step`` seconds after ``START``.
        generation: Its branch.
        epoch: What the training state says.
        ranks: Those that write their file.
        publish: Whether the manifest is written too.
    """
    attempt = attempt_at(step / 3600) if attempt is None else attempt
    store = root.child(step_folder(step))
    layout = MeshLayout(Mesh.world(WORLD_SIZE), (Placement(0),))
    draft = Manifest(
        step=step,
        attempt=attempt,
        generation=generation,
        world_size=WORLD_SIZE,
        tensors=(TensorRow(path=("w",), dtype="F32", shape=SHAPE, layout=layout),),
        created=START.isoformat(),
    )
    files = []
    for rank in ranks:
        image = ImageLayout.pack([("w", "F32", SHAPE, Box((rank,), (1,)))])
        header = ShardHeader(
            step=step,
            attempt=attempt,
            rank=rank,
            world_size=WORLD_SIZE,
            layout=image,
            paths={"w": ("w",)},
            shared={EPOCH: epoch} if rank == 0 else {},
            manifest=draft.to_json() if rank == 0 else None,
        )
        files.append(_put_shard(store, header, np.full(1, step, np.float32).tobytes()))
    manifest = dataclasses.replace(draft, files=tuple(files), values={EPOCH: epoch})
    if publish:
        publish_manifest(store, manifest)
    return manifest


def _put_shard(store: Store, header: ShardHeader, data: bytes) -> FileRow:
    data_offset = len(header.to_bytes())
    buffer = memoryview(bytearray(data_offset) + data)
    name = shard_name(header.attempt, header.rank, header.world_size)
    digest = write_shard(
        store.write(name, len(buffer)),
        buffer,
        data_offset=data_offset,
        block_bytes=BLOCK_BYTES,
        seal=lambda digests: dataclasses.replace(header, digests=tuple(digests)).to_bytes(),
        num_threads=1,
    )
    return FileRow(name=name, num_bytes=len(buffer), data_offset=data_offset, digest=digest)


def tree(store: Store) -> set[str]:
    """Return the keys of everything under a store."""
    below = {f"{name}/{key}" for name in store.list_folders() for key in tree(store.child(name))}
    return below.union(store.list_files())
