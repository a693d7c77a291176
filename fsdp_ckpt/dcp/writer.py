"""The StorageWriter: each rank's contents into its shard file, then one manifest.

Invariant: every helper thread's failure fails the write; the manifest is published only with a receipt of
every rank, and its files are durable by then.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from fsdp_ckpt.commit.publish import new_attempt, publish_manifest, refuse_committed
from fsdp_ckpt.dcp.contents import Contents
from fsdp_ckpt.dcp.listed import contents_of_items, manifest_of_items
from fsdp_ckpt.dcp.metadata import ShardedMetadata
from fsdp_ckpt.dcp.save_planner import ShardSavePlanner
from fsdp_ckpt.errors import StorageError
from fsdp_ckpt.manifest.schema import FileRow, Manifest, shard_name
from fsdp_ckpt.manifest.shard import ShardHeader
from fsdp_ckpt.manifest.tree import Path, path_from_json, path_to_json
from fsdp_ckpt.manifest.typed_json import Json
from fsdp_ckpt.plan.image import BLOCK_BYTES
from fsdp_ckpt.snapshot.image import ImagePool, fill_image
from fsdp_ckpt.storage.open import open_store
from fsdp_ckpt.storage.shard_io import write_shard
from fsdp_ckpt.storage.store import Store
from fsdp_ckpt.version import __version__

__all__ = ["Attempt", "ShardReceipt", "ShardedStorageWriter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try to save a step; its id is the coordinator's choice.

    Args:
        id: Unique; names the folder of the shard files.
        step: Training step.
        world_size: Number of ranks.
    """

    id: str
    step: int
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReceipt:
    """Says that a rank's shard file is durable.

    Args:
        file: Its row in the manifest.
        values: The global values that this rank answers for, typed JSON by path.
        inline: Content of the tensors that the manifest holds too, by name; of rank 0.
    """

    file: FileRow
    values: Mapping[Path, Json]
    inline: Mapping[str, bytes]

    def to_json(self) -> Json:
        """Return plain data."""
        row = [self.file.name, self.file.num_bytes, self.file.data_offset, self.file.digest]
        return {
            "file": row,
            "values": [[path_to_json(p), v] for p, v in self.values.items()],
            "inline": {name: data.hex() for name, data in self.inline.items()},
        }

    @classmethod
    def from_json(cls, encoded: Mapping[str, Any]) -> ShardReceipt:
        """Rebuild what :meth:`to_json` described."""
        name, num_bytes, data_offset, digest = encoded["file"]
        row = FileRow(name=name, num_bytes=num_bytes, data_offset=data_offset, digest=digest)
        return cls(
            file=row,
            values={path_from_json(p): v for p, v in encoded["values"]},
            inline={name: bytes.fromhex(data) for name, data in encoded["inline"].items()},
        )


class ShardedStorageWriter(StorageWriter):
    """Writes a checkpoint of format version 1.

    Works with :class:`~fsdp_ckpt.dcp.save_planner.ShardSavePlanner` and with DCP's default planner. Once a
    checkpoint exists under its path, saving there again is refused.

    Args:
        path: The checkpoint's folder: a path, any URL that fsspec knows, or a store.
        step: Training step, recorded in the manifest.
        generation: Number of rollbacks so far, recorded in the manifest.
        num_threads: Threads that digest and write, per rank.
        pool: Buffers to use again; one of its own by default.
        **storage_options: Passed to the fsspec filesystem.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Store,
        *,
        step: int = 0,
        generation: int = 0,
        num_threads: int = 2,
        pool: ImagePool | None = None,
        **storage_options: Any,
    ) -> None:
        self._options = storage_options
        self.store = open_store(path, **storage_options)
        self.step = step
        self.generation = generation
        self._num_threads = num_threads
        self._pool = pool or ImagePool()

    # --- what a save consists of, for any driver ---

    def open_attempt(self, world_size: int) -> Attempt:
        """Choose a fresh attempt; called by the coordinator.

        Raises:
            AlreadyCommittedError: A checkpoint exists under this path.
        """
        refuse_committed(self.store, self.step)
        return Attempt(id=new_attempt(), step=self.step, world_size=world_size)

    def write_contents(
        self, contents: Contents, attempt: Attempt, rank: int, manifest: Manifest | None = None
    ) -> ShardReceipt:
        """Snapshot this rank's contents into an image and make its shard file durable.

        Args:
            contents: What this rank writes.
            attempt: Of this save.
            rank: This rank.
            manifest: On rank 0, the manifest so far, kept in the shard as a spare.

        Raises:
            StorageError: The store failed; no file stays.
        """
        header = ShardHeader(
            step=attempt.step,
            attempt=attempt.id,
            rank=rank,
            world_size=attempt.world_size,
            layout=contents.layout,
            paths=contents.paths,
            own=contents.own,
            values=contents.own_values,
            shared=contents.global_values,
            manifest=None if manifest is None else self._complete(manifest, attempt, ()).to_json(),
        )
        data_offset = len(header.to_bytes())
        num_bytes = data_offset + contents.layout.data_bytes
        buffer = self._pool.acquire(num_bytes)
        try:
            fill_image(buffer, data_offset, contents.layout, contents.resolve)
            inline = contents.inline()
            name = shard_name(attempt.id, rank, attempt.world_size)
            header_digest = write_shard(
                self.store,
                name,
                memoryview(buffer)[:num_bytes],
                data_offset=data_offset,
                block_bytes=BLOCK_BYTES,
                seal=lambda digests: dataclasses.replace(header, digests=tuple(digests)).to_bytes(),
                num_threads=self._num_threads,
            )
        finally:
            self._pool.release(buffer)
        row = FileRow(name=name, num_bytes=num_bytes, data_offset=data_offset, digest=header_digest)
        return ShardReceipt(file=row, values=contents.global_values, inline=inline)

    def publish(
        self, manifest: Manifest, attempt: Attempt, receipts: Sequence[ShardReceipt]
    ) -> Manifest:
        """Publish the manifest with the rows of all files; called by the coordinator.

        Raises:
            AlreadyCommittedError: Another attempt was published first.
            StorageError: The manifest could not be written.
        """
        complete = self._complete(manifest, attempt, receipts)
        complete.check()
        publish_manifest(self.store, complete)
        return complete

    def _complete(
        self, manifest: Manifest, attempt: Attempt, receipts: Sequence[ShardReceipt]
    ) -> Manifest:
        values = dict(manifest.values)
        inline = dict(manifest.inline)
        for receipt in receipts:
            values.update(receipt.values)
            inline.update(receipt.inline)
        return dataclasses.replace(
            manifest,
            step=attempt.step,
            attempt=attempt.id,
            generation=self.generation,
            files=tuple(receipt.file for receipt in receipts),
            values=values,
            inline=inline,
            library=__version__,
        )

    # --- DCP's calls ---

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start a new save, into ``checkpoint_id`` where given."""
        if checkpoint_id is not None:
            self.store = open_store(checkpoint_id, **self._options)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Refuse what this writer cannot do.

        Raises:
            StorageError: ``use_collectives=False``: without all ranks' receipts nothing can be sealed.
        """
        if kwargs.get("use_collectives") is False:
            raise StorageError("use_collectives=False cannot commit one checkpoint of all ranks")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Open an attempt and tell it to every rank."""
        attempt = self.open_attempt(len(plans))
        return [
            dataclasses.replace(plan, storage_data=(attempt, rank))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's shard file."""
        attempt, rank = plan.storage_data
        manifest = None
        if isinstance(planner, ShardSavePlanner):
            contents = planner.contents()
            manifest = planner.draft_manifest() if rank == 0 else None
        else:
            contents = contents_of_items(plan, planner)
        receipt = self.write_contents(contents, attempt, rank, manifest)
        sizes = {(e.name, e.box.offsets): e.num_bytes for e in contents.layout.entries}
        results = [
            WriteResult(index=MetadataIndex(""), size_in_bytes=0, storage_data=(receipt, attempt))
        ]
        for item in plan.items:
            offsets = tuple(item.index.offset or ())
            results.append(
                WriteResult(
                    index=item.index,
                    size_in_bytes=sizes.get((item.index.fqn, offsets), 0),
                    storage_data=None,
                )
            )
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Seal and publish."""
        receipts = [rank_results[0].storage_data[0] for rank_results in results]
        attempt = results[0][0].storage_data[1]
        if isinstance(metadata, ShardedMetadata) and metadata.manifest is not None:
            manifest = metadata.manifest
        else:
            manifest = manifest_of_items(metadata, results)
        metadata.storage_data = self.publish(manifest, attempt, receipts)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a store can be opened for this path or URL."""
        try:
            open_store(checkpoint_id)
        except StorageError:
            return False
        return True
