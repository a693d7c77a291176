"""The StorageReader: verified bytes first, live tensors after.

    fetch    read every needed block of every needed file, check its digest; nothing live changes
    deliver  copy the pieces into the tensors that the planner resolves

``dcp.load`` calls both in one go, so that a rank whose own bytes are damaged changes nothing of its own;
``CheckpointManager`` lets all ranks agree in between.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import FLATTEN_MAPPING
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from fsdp_ckpt.commit.checkpoint import Checkpoint, Piece, SourceImages
from fsdp_ckpt.dcp.live import CODEC, torch_dtype
from fsdp_ckpt.dcp.load_planner import ReshardLoadPlanner
from fsdp_ckpt.dcp.metadata import to_dcp_metadata
from fsdp_ckpt.errors import CorruptCheckpointError, MismatchError, NotFoundError, StorageError
from fsdp_ckpt.manifest.schema import TensorRow
from fsdp_ckpt.manifest.tree import path_name
from fsdp_ckpt.manifest.typed_json import Json
from fsdp_ckpt.plan.box import Box
from fsdp_ckpt.snapshot.buffer import HostBuffer, ImagePool
from fsdp_ckpt.storage.open import open_store
from fsdp_ckpt.storage.store import Store

__all__ = ["Fetched", "ShardedStorageReader", "piece_tensor"]


@dataclass(frozen=True, slots=True)
class Fetched:
    """A load plan's bytes, verified, in host memory.

    Args:
        pieces: (item, where its bytes lie) per tensor item.
        values: (item, typed JSON) per value.
        empty: (item, row) per tensor that is handed over whole and has no elements.
        absent: Names of which other ranks have their own, and this rank nothing.
        images: The bytes.
    """

    pieces: list[tuple[ReadItem, Piece]]
    values: list[tuple[ReadItem, Json]]
    empty: list[tuple[ReadItem, TensorRow]]
    absent: list[str]
    images: SourceImages


class ShardedStorageReader(StorageReader):
    """Reads checkpoints of format version 1.

    Works with :class:`~fsdp_ckpt.dcp.load_planner.ReshardLoadPlanner` and with DCP's default planner.

    Args:
        path: The checkpoint's folder: a path, any URL that fsspec knows, or a store.
        num_threads: Reads in flight, per rank; by default as many as suit the store.
        pool: Has buffers to read into, touched by earlier saves and loads; memory of its own by default.
        **storage_options: Passed to the fsspec filesystem.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Store,
        *,
        num_threads: int | None = None,
        pool: ImagePool | None = None,
        **storage_options: Any,
    ) -> None:
        self._options = storage_options
        self._num_threads = num_threads
        self._pool = pool
        self._buffers: list[HostBuffer] = []  # of the pool, in use
        self._rank = 0
        self._world_size = 1
        self._keep_own: Callable[[str], bool] = lambda name: False
        self.store = open_store(path, **storage_options)
        self._checkpoint: Checkpoint | None = None

    @property
    def checkpoint(self) -> Checkpoint:
        """The open checkpoint; its manifest is read at the first use."""
        if self._checkpoint is None:
            self._checkpoint = Checkpoint.open(self.store)
        return self._checkpoint

    # --- DCP's calls ---

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start a new load, from ``checkpoint_id`` where given."""
        self._checkpoint = None
        if checkpoint_id is not None:
            self.store = open_store(checkpoint_id, **self._options)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the manifest as DCP's metadata.

        Raises:
            NotFoundError: No checkpoint here.
            CorruptCheckpointError: The manifest is damaged.
            UnsupportedFormatError: Of a newer format version.
        """
        if kwargs.get("rank") is not None:
            # DCP's second try, for metadata that each rank keeps alone; ours is one per checkpoint.
            raise NotFoundError(f"{self.store.url}: no metadata of a single rank")
        self._checkpoint = Checkpoint.open(self.store)
        return to_dcp_metadata(self._checkpoint.manifest)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Learn which rank this is; called by every rank."""
        together = dist.is_available() and dist.is_initialized()
        rank = kwargs.get("rank")
        self.set_up(
            rank=int(rank) if rank is not None else dist.get_rank() if together else 0,
            world_size=dist.get_world_size() if together else 1,
        )

    def set_up(
        self, *, rank: int, world_size: int, keep_own: Callable[[str], bool] = lambda name: False
    ) -> None:
        """Say which rank of how many this is.

        Args:
            rank: This rank.
            world_size: Number of ranks today.
            keep_own: Names whose rank-local content a rank gets back on another world size too, where
                it existed at save time.
        """
        self._rank, self._world_size, self._keep_own = rank, world_size, keep_own

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fetch, then deliver."""
        self.deliver(self.fetch(plan), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a store can be opened for this path or URL."""
        try:
            open_store(checkpoint_id)
        except StorageError:
            return False
        return True

    # --- the two halves of a load ---

    def fetch(self, plan: LoadPlan) -> Fetched:
        """Read and verify everything the plan needs; nothing live changes.

        Raises:
            CorruptCheckpointError: Missing or damaged; names step, rank, file and tensors.
            MismatchError: A rank's own state is asked for on another world size.
            StorageError: The store failed in a way that may pass.
        """
        checkpoint = self.checkpoint
        values_by_name = {path_name(p): v for p, v in checkpoint.manifest.values.items()}
        own_values, own_tensors = self._own_values(), self._own_tensors()
        partial = frozenset(path_name(p) for p in checkpoint.manifest.partial)
        absent: list[str] = []
        varying = frozenset(path_name(p) for p in checkpoint.manifest.varying)
        pieces: list[tuple[ReadItem, Piece]] = []
        values: list[tuple[ReadItem, Json]] = []
        empty: list[tuple[ReadItem, TensorRow]] = []
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type == LoadItemType.TENSOR:
                pieces.append((item, self._tensor_piece(item, varying)))
            elif name in own_values:
                values.append((item, own_values[name]))
            elif name in partial and name not in own_tensors and self._has_own(name):
                absent.append(name)
            elif name in values_by_name and name not in own_tensors:
                values.append((item, values_by_name[name]))
            elif (piece := self._whole_piece(name)) is not None:
                pieces.append((item, piece))
            else:
                empty.append((item, checkpoint.rows[name]))
        allocate = None if self._pool is None else self._allocate
        images = checkpoint.read((piece for _, piece in pieces), self._num_threads, allocate)
        return Fetched(pieces, values, empty, absent, images)

    def _allocate(self, num_bytes: int) -> memoryview:
        if self._pool is None:
            raise AssertionError("no pool")
        buffer = self._pool.acquire(num_bytes)
        self._buffers.append(buffer)
        return memoryview(buffer.memory)

    def release(self) -> None:
        """Give back the buffers of what was fetched; nothing may look at it any more."""
        while self._pool is not None and self._buffers:
            self._pool.release(self._buffers.pop())

    def deliver(self, fetched: Fetched, planner: LoadPlanner) -> None:
        """Put everything that was fetched into the live state.

        Raises:
            MismatchError: The live state asks for what this rank, unlike others, had none of.
        """
        if fetched.absent:
            raise MismatchError(
                f"{', '.join(fetched.absent)}: saved by some ranks for themselves, not by rank {self._rank}"
            )
        self.deliver_tensors(fetched, planner)
        self.deliver_values(fetched, planner)

    def deliver_tensors(self, fetched: Fetched, planner: LoadPlanner) -> None:
        """Copy the tensors into the memory that the planner resolves."""
        with torch.no_grad():
            for item, piece in fetched.pieces:
                if item.type == LoadItemType.TENSOR:
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(piece_tensor(fetched.images, piece))
                    planner.commit_tensor(item, target)

    def deliver_values(self, fetched: Fetched, planner: LoadPlanner) -> None:
        """Give the planner the values, and the tensors that are handed over whole."""
        for item, piece in fetched.pieces:
            if item.type == LoadItemType.BYTE_IO:
                _give_value(planner, item, piece_tensor(fetched.images, piece).clone(), None)
        for item, row in fetched.empty:
            nothing = torch.empty(row.shape, dtype=torch_dtype(row.dtype))
            _give_value(planner, item, nothing, None)
        for item, encoded in fetched.values:
            _give_value(planner, item, CODEC.decode(encoded), encoded)

    def _has_own(self, name: str) -> bool:
        """Whether what this rank saved for itself under ``name`` is still its own today."""
        world_size = self.checkpoint.manifest.world_size
        return world_size == self._world_size or (self._rank < world_size and self._keep_own(name))

    def _own_values(self) -> dict[str, Json]:
        manifest = self.checkpoint.manifest
        if not (manifest.own_paths or manifest.varying) or self._rank >= manifest.world_size:
            return {}
        values = {path_name(p): v for p, v in self.checkpoint.header(self._rank).values.items()}
        return {name: value for name, value in values.items() if self._has_own(name)}

    def _own_tensors(self) -> frozenset[str]:
        manifest = self.checkpoint.manifest
        if not (manifest.own_paths or manifest.varying) or self._rank >= manifest.world_size:
            return frozenset()
        own = self.checkpoint.header(self._rank).own
        return frozenset(name for name in own if self._has_own(name))

    def _tensor_piece(self, item: ReadItem, varying: frozenset[str]) -> Piece:
        checkpoint = self.checkpoint
        name = item.storage_index.fqn
        start = tuple(item.storage_index.offset or ())
        sizes = tuple(item.lengths)
        region = Box(tuple(a + b for a, b in zip(start, item.storage_offsets, strict=True)), sizes)
        if name in varying and self._has_own(name):
            own = checkpoint.own_piece(self._rank, name)
            if own is not None:
                return Piece(own.rank, own.entry, region)
        (piece,) = checkpoint.pieces(checkpoint.rows[name], region)
        return piece

    def _whole_piece(self, name: str) -> Piece | None:
        """Return the tensor that is this rank's own under ``name``, or the global one from which ranks vary.

        ``None`` where the global one has no elements.
        """
        checkpoint, manifest = self.checkpoint, self.checkpoint.manifest
        piece = checkpoint.own_piece(self._rank, name) if self._has_own(name) else None
        if piece is not None:
            return piece
        if name in checkpoint.rows:
            row = checkpoint.rows[name]
            return next(iter(checkpoint.pieces(row, Box.whole(row.shape))), None)
        if self._has_own(name):
            raise CorruptCheckpointError(
                f"step {manifest.step}: the shard of rank {self._rank}, {manifest.files[self._rank].name}, "
                f"lacks the rank's own {name}",
                step=manifest.step,
                rank=self._rank,
                key=name,
            )
        raise MismatchError(
            f"{name}: saved by each of {manifest.world_size} ranks for itself, {self._world_size} ranks "
            "cannot share it out; leave it out of the state to load",
            step=manifest.step,
            key=name,
        )


def piece_tensor(images: SourceImages, piece: Piece) -> torch.Tensor:
    """Return a piece as a host tensor over the image's memory, shape ``piece.region.sizes``."""
    data = torch.from_numpy(images.array(piece))
    return data.view(torch_dtype(piece.entry.dtype)).squeeze(-1)


def _give_value(planner: LoadPlanner, item: ReadItem, value: Any, encoded: Json) -> None:
    name = item.dest_index.fqn
    if isinstance(planner, ReshardLoadPlanner):
        planner.load_value(name, value)
    elif isinstance(planner, DefaultLoadPlanner):
        # Its load_bytes unpickles; put the value where that would have put it.
        mappings: FLATTEN_MAPPING = planner.mappings
        if planner.flatten_state_dict:
            set_element(planner.original_state_dict, mappings[name], value)
        else:  # planner.state_dict may be a copy that DCP drops
            planner.original_state_dict[name] = value
    else:
        planner.load_bytes(item, io.BytesIO(json.dumps(encoded, separators=(",", ":")).encode()))
