"""A checkpoint of any number of ranks, written by one process.

    tensors -> rows on today's ranks -> one shard file after the other -> manifest, published last

Invariant: what stands on storage afterwards is what a save by these ranks would have written. Nothing exists
before the manifest does; a run that fails before removes its files.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from fsdp_ckpt.commit.publish import new_attempt, publish_manifest, refuse_committed
from fsdp_ckpt.commit.receipt import Attempt, ShardReceipt, seal
from fsdp_ckpt.commit.source_images import Piece
from fsdp_ckpt.errors import CheckpointError
from fsdp_ckpt.hf.shard_files import Source, StreamedShard, read_whole
from fsdp_ckpt.manifest.schema import Manifest, TensorRow, shard_name
from fsdp_ckpt.manifest.shard import ShardHeader
from fsdp_ckpt.manifest.tree import Path, path_name
from fsdp_ckpt.manifest.typed_json import Json
from fsdp_ckpt.plan.balance import assign_replicas
from fsdp_ckpt.plan.box import Box
from fsdp_ckpt.plan.dtypes import itemsize
from fsdp_ckpt.plan.image import ImageLayout
from fsdp_ckpt.storage.store import Store

__all__ = ["OwnState", "place_rows", "write_checkpoint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnState:
    """What one rank has for itself.

    Args:
        tensors: Path → the piece that is the whole tensor.
        values: Typed JSON by path.
    """

    tensors: Mapping[Path, Piece] = field(default_factory=dict)
    values: Mapping[Path, Json] = field(default_factory=dict)


def place_rows(rows: Sequence[TensorRow], world_size: int) -> tuple[TensorRow, ...]:
    """Choose who writes what several ranks hold, so that bytes are balanced."""
    tensors = [(itemsize(row.dtype), row.shape, row.layout) for row in rows]
    replicas = assign_replicas(tensors, world_size)
    return tuple(
        dataclasses.replace(row, replica=replica)
        for row, replica in zip(rows, replicas, strict=True)
    )


def write_checkpoint(
    store: Store,
    draft: Manifest,
    source: Source,
    own: Mapping[int, OwnState] | None = None,
    *,
    num_threads: int | None = None,
) -> Manifest:
    """Write all shard files, and publish the manifest.

    Args:
        store: The checkpoint's folder.
        draft: Step, world size, rows, values and paths; what belongs to the attempt is filled in.
        source: Has every row's tensor under the row's name.
        own: Rank → what it has for itself.
        num_threads: Reads or writes in flight; by default as many as suit the stores.

    Returns:
        The manifest as published.

    Raises:
        AlreadyCommittedError: A checkpoint exists there.
        CorruptCheckpointError: The source is damaged.
        StorageError: A store failed.
    """
    refuse_committed(store, draft.step)
    attempt = Attempt(
        id=new_attempt(),
        step=draft.step,
        world_size=draft.world_size,
        generation=draft.generation,
    )
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    draft = dataclasses.replace(draft, created=created)
    receipts: list[ShardReceipt] = []
    try:
        for rank in range(draft.world_size):
            mine = (own or {}).get(rank, OwnState())
            shard = _shard(draft, attempt, rank, source, mine, num_threads)
            receipts.append(_receipt(shard, store, draft, rank))
    except BaseException:
        for receipt in receipts:
            with suppress(CheckpointError):  # the first error is the one to know
                store.delete(receipt.file.name)
        raise
    manifest = seal(draft, attempt, receipts)
    manifest.check()
    publish_manifest(store, manifest)
    return manifest


def _shard(
    draft: Manifest,
    attempt: Attempt,
    rank: int,
    source: Source,
    own: OwnState,
    num_threads: int | None,
) -> StreamedShard:
    chunks = [
        (row.name, row.dtype, row.shape, box)
        for row in draft.tensors
        if row.layout.replica_of(rank) == row.replica
        for box in row.layout.boxes_of(row.shape, rank)
    ]
    for path, piece in own.tensors.items():
        shape = piece.entry.shape
        chunks.append((path_name(path), piece.entry.dtype, shape, Box.whole(shape)))
    header = ShardHeader(
        step=attempt.step,
        attempt=attempt.id,
        rank=rank,
        world_size=attempt.world_size,
        layout=ImageLayout.pack(chunks),
        paths={path_name(p): p for p in (*(row.path for row in draft.tensors), *own.tensors)},
        own=frozenset(map(path_name, own.tensors)),
        values=own.values,
        shared=draft.values if rank == 0 else {},
        manifest=seal(dataclasses.replace(draft, values={}), attempt).to_json()
        if rank == 0
        else None,
    )
    return StreamedShard(
        key=shard_name(attempt.id, rank, attempt.world_size),
        header=header,
        source=source,
        own={path_name(path): piece for path, piece in own.tensors.items()},
        num_threads=num_threads,
    )


def _receipt(shard: StreamedShard, store: Store, draft: Manifest, rank: int) -> ShardReceipt:
    file = shard.write(store)
    if rank != 0:
        return ShardReceipt(file=file, values={}, inline={})
    inline = [(row.name, row.dtype, row.shape) for row in draft.tensors if row.is_inline]
    return ShardReceipt(file=file, values={}, inline=read_whole(shard.source, inline))
