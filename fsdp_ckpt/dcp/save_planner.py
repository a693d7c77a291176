"""The save side's plan: every rank computes its own chunks; ranks compare one hash.

    state dict -> leaves -> Summary --(hash, or the summary where hashes differ)--> Agreement -> Contents

Under plain ``dcp.save`` the summary travels in the local plan, and the agreement comes back in the final one.
``CheckpointManager`` exchanges them over its own channel.
"""

from __future__ import annotations

import datetime
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from fsdp_ckpt.dcp.agreement import Agreement, agree
from fsdp_ckpt.dcp.contents import Contents
from fsdp_ckpt.dcp.live import torch_dtype
from fsdp_ckpt.dcp.metadata import to_dcp_metadata
from fsdp_ckpt.dcp.state_view import StateView
from fsdp_ckpt.dcp.summary import Summary
from fsdp_ckpt.errors import MismatchError
from fsdp_ckpt.manifest.schema import Manifest
from fsdp_ckpt.manifest.tree import Path, path_name
from fsdp_ckpt.plan.box import Box
from fsdp_ckpt.plan.image import Chunk, Entry, ImageLayout

__all__ = ["ShardSavePlanner"]


class ShardSavePlanner(SavePlanner):
    """Plans a save for :class:`~fsdp_ckpt.dcp.writer.ShardedStorageWriter`.

    Holds references to the live tensors between ``set_up_planner`` and the end of the save, and never
    changes them. Every rank uses its own instance.
    """

    def __init__(self) -> None:
        self._view = StateView()
        self._agreement: Agreement | None = None
        self._layout: ImageLayout | None = None
        self._paths: dict[str, Path] = {}  # of the layout's entries
        self._own_tensors: frozenset[str] = frozenset()
        self._inline_names: list[str] | None = None
        self._rank = 0
        self._world_size = 1

    # --- the leaves of this rank ---

    def set_up_planner(
        self,
        state_dict: Mapping[Any, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the state apart; called by every rank.

        Raises:
            UnencodableStateError: A leaf cannot be saved; names it, before anything is written.
        """
        together = dist.is_available() and dist.is_initialized()
        self.set_up(
            state_dict,
            rank=dist.get_rank() if together else 0,
            world_size=dist.get_world_size() if together else 1,
        )

    def set_up(self, state_dict: Mapping[Any, Any], *, rank: int, world_size: int) -> None:
        """Take the state apart for ``rank`` of ``world_size``; see :meth:`set_up_planner`."""
        if not self._view.look_at(state_dict, rank=rank, world_size=world_size):
            self._layout = None

    @property
    def structure(self) -> str:
        """Digest of names, kinds, dtypes, shapes and shardings, as this rank sees them."""
        return self._view.structure

    def content(self) -> str:
        """Return the digest of what is expected to be equal on all ranks."""
        return self._view.content()

    def summary(self) -> Summary:
        """Return what this rank tells the others where digests differ."""
        return self._view.summary()

    def forget(self) -> None:
        """Let go of the live tensors; call it when the save has ended."""
        self._view.forget()

    def accept(self, agreement: Agreement, rank: int, world_size: int) -> None:
        """Take over what all ranks agreed on; the same object again costs nothing."""
        if agreement is not self._agreement or (rank, world_size) != (self._rank, self._world_size):
            self._layout, self._inline_names = None, None
        self._agreement, self._rank, self._world_size = agreement, rank, world_size

    @property
    def agreement(self) -> Agreement:
        """What all ranks agreed on."""
        if self._agreement is None:
            raise AssertionError("no agreement yet")
        return self._agreement

    def contents(self) -> Contents:
        """Return what this rank writes."""
        agreement, view = self.agreement, self._view
        own = agreement.own.get(self._rank, frozenset())
        if self._layout is None:
            chunks = [*agreement.chunks_of(self._rank), *self._own_chunks(own)]
            self._layout = ImageLayout.pack(chunks)
            self._paths = {e.name: view.path_of(e.name) for e in self._layout.entries}
            self._own_tensors = frozenset(name for name in own if view.has_tensor(name))
        return Contents(
            layout=self._layout,
            paths=self._paths,
            resolve=lambda entry: self._resolve(entry, own),
            own=self._own_tensors,
            own_values={view.path_of(n): v for n, v in view.values.items() if n in own},
            inline=self._inline,
            global_values={
                view.path_of(name): view.values[name]
                for name, owner in agreement.value_owners.items()
                if owner == self._rank
            },
        )

    def expected_contents(self) -> Contents | None:
        """Return what this rank writes if all agree as for the last save; ``None``: its own state differs."""
        return None if self._layout is None else self.contents()

    def _inline(self) -> dict[str, bytes]:
        if self._rank != 0:
            return {}
        if self._inline_names is None:
            self._inline_names = [row.name for row in self.agreement.tensors if row.is_inline]
        return self._view.bytes_by_name(self._inline_names)

    def _own_chunks(self, own: frozenset[str]) -> Iterator[Chunk]:
        for name in sorted(own):
            if self._view.has_tensor(name):
                live = self._view.live(name)
                shape = tuple(live.local.shape)
                yield name, live.dtype, shape, Box.whole(shape)

    def _resolve(self, entry: Entry, own: frozenset[str]) -> torch.Tensor:
        quick = self._view.local_dtensor(entry.name)
        if quick is not None and quick.shape == entry.box.sizes:
            return quick
        if entry.name in own:
            return self._view.live(entry.name).local
        return self._part(entry.name, entry.box.offsets)

    def _part(self, name: str, offsets: tuple[int, ...]) -> torch.Tensor:
        parts = self._view.live(name).parts
        return next(local for box, local in parts if box.offsets == offsets)

    def is_plain(self, name: str) -> bool:
        """Whether this rank holds a tensor without a layout of its own."""
        return self._view.has_tensor(name) and self._view.live(name).layout is None

    def parts(self, name: str) -> Sequence[tuple[Box, torch.Tensor]]:
        """Return what this rank holds of a tensor, empty where it has none of it."""
        return self._view.live(name).parts if self._view.has_tensor(name) else ()

    def draft_manifest(self) -> Manifest:
        """Return the manifest as far as it is known before anything is written; the writer completes it."""
        return Manifest(
            step=0,
            attempt="",
            world_size=self._world_size,
            tensors=self.agreement.tensors,
            rank_local=self.agreement.rank_local,
            partial=self.agreement.partial,
            varying=self.agreement.varying,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )

    # --- DCP's five calls ---

    def create_local_plan(self) -> SavePlan:
        """Return a plan without items: what travels is the summary."""
        return SavePlan([], planner_data=self.summary().to_json())

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Agree; called by the coordinator.

        Raises:
            MismatchError: Ranks contradict each other.
        """
        distinct: dict[str, Summary] = {}
        summaries = []
        for plan in all_plans:
            key = json.dumps(plan.planner_data, separators=(",", ":"))
            if key not in distinct:
                distinct[key] = Summary.from_json(plan.planner_data)
            summaries.append(distinct[key])
        agreement = agree(summaries)
        for row in agreement.tensors:
            if row.layout.max_rank >= len(all_plans):
                raise MismatchError(
                    f"{row.name}: sharded over ranks that do not take part in this save; save with all ranks "
                    "of the job, in its default process group",
                    key=row.name,
                )
        plans = [
            SavePlan([], planner_data=(agreement, r, len(all_plans))) for r in range(len(all_plans))
        ]
        self.accept(agreement, 0, len(all_plans))
        return plans, to_dcp_metadata(self.draft_manifest())

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Turn the agreement into this rank's write items."""
        agreement, rank, world_size = new_plan.planner_data
        self.accept(agreement, rank, world_size)
        contents = self.contents()
        items = [_tensor_write_item(entry) for entry in contents.layout.entries]
        items += [
            WriteItem(index=MetadataIndex(path_name(path)), type=WriteItemType.BYTE_IO)
            for path in (*contents.global_values, *contents.own_values)
        ]
        return SavePlan(items, storage_data=new_plan.storage_data)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the live local tensor, or the value as typed JSON."""
        name = write_item.index.fqn
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(json.dumps(self._view.values[name], separators=(",", ":")).encode())
        return self._part(name, tuple(write_item.index.offset or ()))


def _tensor_write_item(entry: Entry) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(entry.name, entry.box.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(
                offsets=torch.Size(entry.box.offsets), sizes=torch.Size(entry.box.sizes)
            ),
            properties=TensorProperties(dtype=torch_dtype(entry.dtype)),
            size=torch.Size(entry.shape),
        ),
    )
