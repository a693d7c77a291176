"""The StorageWriter: each rank's contents into its shard file, then one manifest.

Invariant: every helper thread's failure fails the write; the manifest is published only with a receipt of
every rank, and its files are durable by then.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from concurrent.futures import wait
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from fsdp_ckpt.commit.publish import new_attempt, publish_manifest, refuse_committed
from fsdp_ckpt.commit.receipt import Attempt, ShardReceipt, seal
from fsdp_ckpt.dcp.contents import Contents
from fsdp_ckpt.dcp.listed import contents_of_items, manifest_of_items
from fsdp_ckpt.dcp.metadata import ShardedMetadata
from fsdp_ckpt.dcp.save_planner import ShardSavePlanner
from fsdp_ckpt.dcp.shard_image import ShardImage, write_job
from fsdp_ckpt.errors import StorageError
from fsdp_ckpt.manifest.schema import Manifest
from fsdp_ckpt.snapshot.buffer import ImagePool
from fsdp_ckpt.storage.open import open_store
from fsdp_ckpt.storage.store import Store
from fsdp_ckpt.writer.thread import ThreadWriter

__all__ = ["ShardedStorageWriter"]


class ShardedStorageWriter(StorageWriter):
    """Writes a checkpoint of format version 1.

    Works with :class:`~fsdp_ckpt.dcp.save_planner.ShardSavePlanner` and with DCP's default planner. Once a
    checkpoint exists under its path, saving there again is refused.

    Args:
        path: The checkpoint's folder: a path, any URL that fsspec knows, or a store.
        step: Training step, recorded in the manifest.
        generation: Number of rollbacks so far, recorded in the manifest.
        num_threads: Threads that write, per rank; by default as many as suit the store.
        pool: Buffers to use again; one of its own by default.
        **storage_options: Passed to the fsspec filesystem.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Store,
        *,
        step: int = 0,
        generation: int = 0,
        num_threads: int | None = None,
        pool: ImagePool | None = None,
        **storage_options: Any,
    ) -> None:
        self._options = storage_options
        self.store = open_store(path, **storage_options)
        self.step = step
        self.generation = generation
        self._num_threads = num_threads
        self._pool = pool or ImagePool()
        self._writer = ThreadWriter()

    # --- what a save consists of, for any driver ---

    def open_attempt(self, world_size: int) -> Attempt:
        """Choose a fresh attempt; called by the coordinator.

        Raises:
            AlreadyCommittedError: A checkpoint exists under this path.
        """
        refuse_committed(self.store, self.step)
        return Attempt(
            id=new_attempt(), step=self.step, world_size=world_size, generation=self.generation
        )

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
        image = ShardImage.begin(contents, attempt, rank, self._pool, manifest=manifest)
        try:
            job = write_job(image.data_offset, contents.layout, self._num_threads, {})
            pending = self._writer.submit(
                job, image.view, image.buffer.fd, self.store, image.file_name()
            )
            try:
                image.fill(pending.filled)
            except BaseException as e:
                pending.fail(e)
                wait([pending.future])
                raise
            return image.receipt(pending.future.result())
        finally:
            self._pool.release(image.buffer)

    def publish(
        self, manifest: Manifest, attempt: Attempt, receipts: Sequence[ShardReceipt]
    ) -> Manifest:
        """Publish the manifest with the rows of all files; called by the coordinator.

        Raises:
            AlreadyCommittedError: Another attempt was published first.
            StorageError: The manifest could not be written.
        """
        complete = seal(manifest, attempt, receipts)
        complete.check()
        publish_manifest(self.store, complete)
        return complete

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
