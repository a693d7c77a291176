"""The load side's plan: what today's ranks hold, against what the checkpoint holds.

Invariant: every difference is found before a byte of data is read, and reported in one error; the live
state changes only when ``load_bytes``, ``load_value`` or a resolved tensor is written.
"""

from __future__ import annotations

import fnmatch
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from fsdp_ckpt.dcp.leaves import LIVE_TENSOR, leaves_of, set_leaf
from fsdp_ckpt.dcp.live import CODEC, LiveTensor, describe_tensor
from fsdp_ckpt.dcp.metadata import ShardedMetadata
from fsdp_ckpt.errors import MismatchError
from fsdp_ckpt.manifest.schema import Manifest, TensorRow
from fsdp_ckpt.manifest.tree import Path, path_name
from fsdp_ckpt.plan.box import Box, overlap

__all__ = ["LoadDifferences", "ReshardLoadPlanner", "matches", "read_items"]


@dataclass(slots=True)
class LoadDifferences:
    """What a load was allowed to pass over.

    Args:
        missing: Names in the live state that the checkpoint lacks; they keep their live values.
        unexpected: Names in the checkpoint that the live state lacks; they are not loaded.
        cast: Name → (saved dtype, live dtype).
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    cast: dict[str, tuple[str, str]] = field(default_factory=dict)


class ReshardLoadPlanner(LoadPlanner):
    """Plans the load of any saved layout into any live one.

    Args:
        allow_missing: Patterns (``fnmatch``) of live names that the checkpoint may lack.
        allow_unexpected: Patterns of saved names that the live state may lack. By default all, so that
            ``dcp.load`` can load a part.
        allow_cast: Load into another dtype, by ``Tensor.copy_``'s rounding.
    """

    def __init__(
        self,
        *,
        allow_missing: Iterable[str] = (),
        allow_unexpected: Iterable[str] = ("*",),
        allow_cast: bool = False,
    ) -> None:
        self._allow_missing = tuple(allow_missing)
        self._allow_unexpected = tuple(allow_unexpected)
        self._allow_cast = allow_cast
        self._put: Callable[[Path, Any], object] = lambda path, value: None
        self._paths: dict[str, Path] = {}
        self._tensors: dict[str, LiveTensor] = {}
        self._rows: dict[str, TensorRow] = {}
        self.differences = LoadDifferences()
        self.unclaimed: list[str] = []
        self._problems: list[str] = []

    def set_up_planner(
        self,
        state_dict: Mapping[Any, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Compare the live state with the checkpoint; called by every rank.

        Raises:
            MismatchError: All differences that are not allowed, with expected and found.
        """
        if not isinstance(metadata, ShardedMetadata) or metadata.manifest is None:
            raise MismatchError(
                "ReshardLoadPlanner reads checkpoints of fsdp_ckpt; use it with ShardedStorageReader"
            )
        together = dist.is_available() and dist.is_initialized()
        self.set_up(
            {path: leaf for path, leaf, _ in leaves_of(state_dict)},
            metadata.manifest,
            rank=dist.get_rank() if together else 0,
            put=lambda path, value: set_leaf(state_dict, path, value),
        )
        self.judge(self.unclaimed)

    @torch.no_grad()  # under which DTensor.to_local() costs nothing
    def set_up(
        self,
        leaves: Mapping[Path, Any],
        manifest: Manifest,
        *,
        rank: int,
        put: Callable[[Path, Any], object],
        missing: Iterable[str] = (),
        problems: Iterable[str] = (),
        left_out: Iterable[Path] = (),
    ) -> None:
        """Compare the leaves of a state with the checkpoint; :meth:`judge` tells the outcome.

        Args:
            leaves: Path → tensor to fill, or anything else for a value.
            manifest: The checkpoint's.
            rank: This rank.
            put: Takes each loaded value at its path.
            missing: Further names that the checkpoint lacks.
            problems: Further differences that nothing allows.
            left_out: Saved paths that are passed over on purpose.
        """
        self._manifest = manifest
        self._put, self.differences = put, LoadDifferences()
        self._paths, self._tensors = {}, {}
        self._rows = {row.name: row for row in manifest.tensors}
        saved_values = dict.fromkeys(path_name(path) for path in manifest.values)
        own = dict.fromkeys(path_name(path) for path in manifest.own_paths)
        # A rank's own tensor may have another shape than the global one: it is handed over whole.
        handed_over = own.keys() | {path_name(path) for path in manifest.varying}
        found = self._problems = list(problems)
        for name in missing:
            self._judge_missing(name, found)
        layouts: dict[Any, Any] = {}
        for path, leaf in leaves.items():
            name = path_name(path)
            is_tensor = isinstance(leaf, LIVE_TENSOR)
            known = self._rows if is_tensor else saved_values.keys() | handed_over
            if name not in known and name not in own:
                if name in self._rows or name in saved_values:
                    kinds = ("value", "tensor") if is_tensor else ("tensor", "value")
                    found.append(f"{name}: a {kinds[0]} in the checkpoint, a {kinds[1]} here")
                    self._paths[name] = path
                else:
                    self._judge_missing(name, found)
                continue
            self._paths[name] = path
            if is_tensor:
                live = self._tensors[name] = describe_tensor(leaf, name, rank, layouts)
                if name in self._rows:
                    found.extend(self._compare(name, live, self._rows[name]))
        claimed = self._paths.keys() | {path_name(path) for path in left_out}
        self.unclaimed = [n for n in (*self._rows, *saved_values, *own) if n not in claimed]

    @property
    def fits_alone(self) -> bool:
        """Whether :meth:`judge` will find nothing, whatever the other ranks take."""
        return not self._problems and all(
            matches(name, self._allow_unexpected) for name in self.unclaimed
        )

    def judge(self, unclaimed: Iterable[str]) -> None:
        """Raise all differences that are not allowed, in one error.

        Args:
            unclaimed: Saved names that no rank takes: pipeline stages and partitions take their parts.

        Raises:
            MismatchError: See :meth:`set_up_planner`.
        """
        found, manifest = list(self._problems), self._manifest
        for name in unclaimed:
            if matches(name, self._allow_unexpected):
                self.differences.unexpected.append(name)
            else:
                found.append(f"{name}: in the checkpoint, not here")
        if found:
            raise MismatchError(
                f"the checkpoint of step {manifest.step} does not fit the live state, {len(found)} "
                f"difference{'s' if len(found) > 1 else ''}: {'; '.join(found)}. Fix the model, or allow "
                "them by allow_missing, allow_unexpected, allow_cast",
                step=manifest.step,
                attempt=manifest.attempt,
            )

    def _judge_missing(self, name: str, found: list[str]) -> None:
        if matches(name, self._allow_missing):
            self.differences.missing.append(name)
        else:
            found.append(f"{name}: missing in the checkpoint")

    def _compare(self, name: str, live: LiveTensor, row: TensorRow) -> Iterable[str]:
        if live.shape != row.shape:
            yield f"{name}: shape {list(row.shape)} in the checkpoint, {list(live.shape)} here"
        if live.dtype != row.dtype:
            if self._allow_cast:
                self.differences.cast[name] = (row.dtype, live.dtype)
            else:
                yield f"{name}: dtype {row.dtype} in the checkpoint, {live.dtype} here"

    def create_local_plan(self) -> LoadPlan:
        """Return one read item per stored chunk that this rank needs, and one per value."""
        items: list[ReadItem] = []
        for name in self._paths:
            if name in self._tensors and name in self._rows:
                parts = self._tensors[name].parts
                items.extend(read_items(self._rows[name], (box for box, _ in parts)))
            else:
                items.append(_whole_item(name))
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are: no rank needs to know another's."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value, given as typed JSON, into the state dict."""
        self.load_value(read_item.dest_index.fqn, CODEC.decode(json.loads(value.getvalue())))

    def load_value(self, name: str, value: Any) -> None:
        """Put a value into the state dict; a tensor is copied into the live one."""
        live = self._tensors.get(name)
        if live is None:
            self._put(self._paths[name], value)
        else:
            live.local.copy_(value)

    def is_loaded(self, path: Path) -> bool:
        """Whether the checkpoint has something for this leaf."""
        return path_name(path) in self._paths

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the live memory that the item goes to."""
        offsets = tuple(read_item.dest_index.offset or ())
        parts = self._tensors[read_item.dest_index.fqn].parts
        target = next(local for box, local in parts if box.offsets == offsets)
        for dim, (start, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing to do: the resolved tensor is the live memory."""


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name matches one of the patterns (``fnmatch``, case matters)."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _whole_item(name: str) -> ReadItem:
    """A value, or a tensor of this rank's own: the reader knows where it lies."""
    nothing = torch.Size()
    return ReadItem(
        type=LoadItemType.BYTE_IO,
        dest_index=MetadataIndex(name),
        dest_offsets=nothing,
        storage_index=MetadataIndex(name),
        storage_offsets=nothing,
        lengths=nothing,
    )


def read_items(row: TensorRow, boxes: Iterable[Box]) -> Iterator[ReadItem]:
    """Yield what a rank reads of one tensor to fill its boxes: one item per stored chunk that meets one."""
    name = row.name
    for wanted in boxes:
        for _, box in row.overlapping(wanted):
            region = overlap(box, wanted)
            if region is not None:
                yield ReadItem(
                    type=LoadItemType.TENSOR,
                    dest_index=MetadataIndex(name, wanted.offsets),
                    dest_offsets=_relative(region, wanted),
                    storage_index=MetadataIndex(name, box.offsets),
                    storage_offsets=_relative(region, box),
                    lengths=torch.Size(region.sizes),
                )


def _relative(inner: Box, outer: Box) -> torch.Size:
    return torch.Size([a - b for a, b in zip(inner.offsets, outer.offsets, strict=True)])
