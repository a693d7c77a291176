"""The StorageReader: verified bytes first, live tensors after.

    fetch    read every needed block of every needed file, check its digest; this rank's own file is
             read ahead while that is being planned
    deliver  copy the pieces into the tensors that the planner resolves

``dcp.load`` calls both in one go, so that a rank whose own bytes are damaged changes nothing of its own.
``CheckpointManager`` lets all ranks agree in between, and has what is verified swapped with the live memory
while the rest is being read: ``undo`` swaps it back.
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
from fsdp_ckpt.commit.rank_pieces import PieceFinder
from fsdp_ckpt.dcp.live import CODEC, torch_dtype
from fsdp_ckpt.dcp.load_planner import ReshardLoadPlanner
from fsdp_ckpt.dcp.metadata import to_dcp_metadata
from fsdp_ckpt.dcp.moves import by_rank, plan_moves
from fsdp_ckpt.dcp.pieces import item_piece, piece_tensor
from fsdp_ckpt.dcp.read_memory import ReadMemory
from fsdp_ckpt.errors import MismatchError, NotFoundError, StorageError
from fsdp_ckpt.manifest.schema import TensorRow
from fsdp_ckpt.manifest.tree import path_name
from fsdp_ckpt.manifest.typed_json import Json
from fsdp_ckpt.snapshot.buffer import ImagePool
from fsdp_ckpt.snapshot.exchange import Exchange
from fsdp_ckpt.storage.open import open_store
from fsdp_ckpt.storage.store import Store

__all__ = ["Fetched", "ShardedStorageReader"]


@dataclass(frozen=True, slots=True)
class Fetched:
    """A load plan's bytes, verified, in host memory.

    Args:
        pieces: (item, where its bytes lie) per tensor item.
        values: (item, typed JSON) per value.
        empty: (item, row) per tensor that is handed over whole and has no elements.
        absent: Names of which other ranks have their own, and this rank nothing.
        images: The bytes.
        live: Items whose bytes are in their live tensors already, by their place among ``pieces``.
    """

    pieces: list[tuple[ReadItem, Piece]]
    values: list[tuple[ReadItem, Json]]
    empty: list[tuple[ReadItem, TensorRow]]
    absent: list[str]
    images: SourceImages
    live: frozenset[int] = frozenset()


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
        self._memory = ReadMemory(pool, num_threads)
        self._exchange = Exchange({})
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

    def fetch(
        self, plan: LoadPlan, into: LoadPlanner | None = None, *, from_memory: bool = False
    ) -> Fetched:
        """Read and verify everything the plan needs; nothing live changes.

        Args:
            plan: What to read.
            into: Swap what can be with the live tensors that it resolves, on the way; until
                :meth:`deliver_tensors`, :meth:`undo` puts them back, and it must where this raises.
            from_memory: Take files whose bytes the pool still has from there; verified, as all others.

        Raises:
            CorruptCheckpointError: Missing or damaged; names step, rank, file and tensors.
            MismatchError: A rank's own state is asked for on another world size.
            StorageError: The store failed in a way that may pass.
        """
        checkpoint = self.checkpoint
        finder = PieceFinder(checkpoint, self._rank, self._world_size, self._keep_own)
        values_by_name = {path_name(p): v for p, v in checkpoint.manifest.values.items()}
        own_values, own_tensors = finder.own_values, finder.own_tensors
        partial = frozenset(path_name(p) for p in checkpoint.manifest.partial)
        absent: list[str] = []
        pieces: list[tuple[ReadItem, Piece]] = []
        values: list[tuple[ReadItem, Json]] = []
        empty: list[tuple[ReadItem, TensorRow]] = []
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type == LoadItemType.TENSOR:
                pieces.append((item, item_piece(finder, item)))
            elif name in own_values:
                values.append((item, own_values[name]))
            elif name in partial and name not in own_tensors and finder.has_own(name):
                absent.append(name)
            elif name in values_by_name and name not in own_tensors:
                values.append((item, values_by_name[name]))
            elif (piece := finder.whole_piece(name)) is not None:
                pieces.append((item, piece))
            else:
                empty.append((item, checkpoint.rows[name]))
        moves = plan_moves(pieces, into) if into is not None else {}
        exchange = self._exchange = Exchange(by_rank(pieces, moves))
        images = checkpoint.read(
            (piece for _, piece in pieces),
            self._num_threads,
            self._memory.allocate,
            exchange.take,
            lambda rank: self._memory.at_hand(checkpoint, rank, held=from_memory),
        )
        return Fetched(pieces, values, empty, absent, images, frozenset(moves))

    def undo(self) -> None:
        """Give live tensors back what was in them before :meth:`fetch`."""
        self._exchange.undo()

    def open_own_file(self) -> None:
        """Read the header of this rank's own file, where :meth:`read_ahead` will read the rest.

        Raises:
            CorruptCheckpointError: The file is missing, short or damaged.
        """
        if self._reads_ahead:
            self.checkpoint.header(self._rank)

    def read_ahead(self) -> None:
        """Begin to read this rank's own file, of which a plan for the layout it was saved in wants all.

        Not on another number of ranks, nor where the file is small.
        A plan that wants less of it finds what was begun until then read in vain.
        """
        if self._reads_ahead:
            self._memory.read_ahead(self.checkpoint, self._rank)

    @property
    def _reads_ahead(self) -> bool:
        checkpoint = self.checkpoint
        return self._world_size == checkpoint.manifest.world_size and (
            self._memory.is_worth_reading_ahead(checkpoint, self._rank)
        )

    @property
    def num_bytes_held(self) -> int:
        """Bytes that were not read, since a save had left them in host memory."""
        return self._memory.num_bytes_held

    def release(self) -> None:
        """Give back the memory of what was fetched; nothing may look at it any more."""
        self._memory.release()

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
        """Copy the tensors into the memory that the planner resolves; there is no way back."""
        self._exchange.keep()
        with torch.no_grad():
            for number, (item, piece) in enumerate(fetched.pieces):
                if item.type == LoadItemType.TENSOR and number not in fetched.live:
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
