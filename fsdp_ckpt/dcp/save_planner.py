"""The save side's plan: every rank computes its own chunks; ranks compare one hash.

    state dict -> leaves -> Summary --(hash, or the summary where hashes differ)--> Agreement -> Contents

Under plain ``dcp.save`` the summary travels in the local plan, and the agreement comes back in the final one.
``CheckpointManager`` exchanges them over its own channel.
"""

from __future__ import annotations

import datetime
import io
import json
from collections.abc import Iterable, Mapping
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

from fsdp_ckpt.dcp.agreement import Agreement, Item, Summary, agree
from fsdp_ckpt.dcp.contents import Contents
from fsdp_ckpt.dcp.leaves import LIVE_TENSOR, leaves_of
from fsdp_ckpt.dcp.live import CODEC, LiveTensor, describe_tensor, torch_dtype
from fsdp_ckpt.dcp.metadata import to_dcp_metadata
from fsdp_ckpt.manifest.schema import Manifest, TensorRow
from fsdp_ckpt.manifest.tree import Path, path_name
from fsdp_ckpt.manifest.typed_json import Json
from fsdp_ckpt.plan.box import Box
from fsdp_ckpt.plan.image import Entry, ImageLayout
from fsdp_ckpt.plan.layouts import MeshLayout
from fsdp_ckpt.storage.shard_io import digest

__all__ = ["ShardSavePlanner"]


class ShardSavePlanner(SavePlanner):
    """Plans a save for :class:`~fsdp_ckpt.dcp.writer.ShardedStorageWriter`.

    Holds references to the live tensors between ``set_up_planner`` and the end of the save, and never
    changes them. Every rank uses its own instance.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, LiveTensor] = {}
        self._values: dict[str, Json] = {}
        self._summary = Summary({})
        self._agreement: Agreement | None = None
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
        self._tensors, self._values, self._agreement = {}, {}, None
        items: dict[str, Item] = {}
        layouts: dict[Any, MeshLayout] = {}
        for path, leaf, is_own in leaves_of(state_dict):
            name = path_name(path)
            if isinstance(leaf, LIVE_TENSOR):
                live = self._tensors[name] = describe_tensor(leaf, name, rank, layouts)
                items[name] = _tensor_item(path, live, is_own, alone=world_size == 1)
            else:
                value = self._values[name] = CODEC.encode(leaf, name)
                text = json.dumps(value, separators=(",", ":"))
                kind = "own" if is_own else "value"
                content = "" if is_own else digest(text.encode())
                items[name] = Item(kind=kind, path=path, digest=content)  # type: ignore[arg-type]
        self._summary = Summary(items)

    @property
    def summary(self) -> Summary:
        """What this rank tells the others."""
        return self._summary

    def accept(self, agreement: Agreement, rank: int, world_size: int) -> None:
        """Take over what all ranks agreed on."""
        self._agreement, self._rank, self._world_size = agreement, rank, world_size

    @property
    def agreement(self) -> Agreement:
        """What all ranks agreed on."""
        if self._agreement is None:
            raise AssertionError("no agreement yet")
        return self._agreement

    def contents(self) -> Contents:
        """Return what this rank writes."""
        agreement = self.agreement
        own = agreement.own.get(self._rank, frozenset())
        chunks = [
            (row.name, row.dtype, row.shape, box)
            for row in agreement.tensors
            for box in self._boxes_to_write(row)
            if box.num_elements
        ]
        for name in sorted(own & self._tensors.keys()):
            live = self._tensors[name]
            box = Box.whole(tuple(live.local.shape))
            chunks.append((name, live.dtype, tuple(live.local.shape), box))
        items = self._summary.items
        return Contents(
            layout=ImageLayout.pack(chunks),
            paths={name: items[name].path for name, *_ in chunks},
            resolve=lambda entry: self._part(entry.name, entry.box.offsets),
            own=frozenset(own & self._tensors.keys()),
            own_values={items[n].path: self._values[n] for n in self._values if n in own},
            global_values={
                items[name].path: self._values[name]
                for name, owner in agreement.value_owners.items()
                if owner == self._rank
            },
        )

    def draft_manifest(self) -> Manifest:
        """Return the manifest as far as it is known before anything is written; the writer completes it."""
        return Manifest(
            step=0,
            attempt="",
            world_size=self._world_size,
            tensors=self.agreement.tensors,
            rank_local=self.agreement.rank_local,
            varying=self.agreement.varying,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )

    def _boxes_to_write(self, row: TensorRow) -> Iterable[Box]:
        """Return the chunks of which this rank is the one writer among the ranks that hold them."""
        live = self._tensors.get(row.name)
        if live is None or row.layout.replica_of(self._rank) != row.replica:
            return ()
        return (box for box, _ in live.parts)

    def _part(self, name: str, offsets: tuple[int, ...]) -> torch.Tensor:
        return next(local for box, local in self._tensors[name].parts if box.offsets == offsets)

    # --- DCP's five calls ---

    def create_local_plan(self) -> SavePlan:
        """Return a plan without items: what travels is the summary."""
        return SavePlan([], planner_data=self._summary.to_json())

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
        plans = [SavePlan([], planner_data=(agreement, r, len(all_plans))) for r in range(len(all_plans))]
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
            return io.BytesIO(json.dumps(self._values[name], separators=(",", ":")).encode())
        return self._part(name, tuple(write_item.index.offset or ()))


def _tensor_item(path: Path, live: LiveTensor, is_own: bool, *, alone: bool) -> Item:
    if is_own:
        return Item(kind="own", path=path)
    # A DTensor's content differs by design; a plain tensor's must not go unnoticed.
    content = "" if live.layout is not None or alone else tensor_digest(live.local)
    return Item(
        kind="tensor",
        path=path,
        dtype=live.dtype,
        shape=live.shape,
        layout=live.layout,
        digest=content,
    )


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return the digest of a tensor's bytes, row-major."""
    host = tensor.detach().to("cpu").contiguous()
    return digest(host.reshape(-1).view(torch.uint8).numpy().data)


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
