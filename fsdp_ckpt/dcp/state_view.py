"""One rank's state dict, taken apart: what must be the same on all ranks, and what this rank holds.

Invariant: a state of the structure seen before (the same containers, names, kinds, dtypes, shapes, shardings)
costs microseconds per tensor; nothing about it is derived again. Two digests say all that ranks must
compare: one of the structure, one of the content that is expected to be equal everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor

from fsdp_ckpt.dcp.leaves import LIVE_TENSOR, StateSkeleton, leaves_of
from fsdp_ckpt.dcp.live import CODEC, LiveTensor, describe_tensor, plain_tensor
from fsdp_ckpt.dcp.summary import Item, Summary
from fsdp_ckpt.manifest.tree import Path, path_name
from fsdp_ckpt.manifest.typed_json import Json
from fsdp_ckpt.plan.layouts import MeshLayout
from fsdp_ckpt.state.local_shards import LocalShards
from fsdp_ckpt.state.rank_local import RankLocal

__all__ = ["StateView", "bytes_of"]

_SMALL_ELEMENTS = 64


class StateView:
    """What one rank holds, seen anew at every save."""

    def __init__(self) -> None:
        self._skeleton: StateSkeleton | None = None
        self._rank = 0
        self._world_size = 1
        self._leaves: list[Any] = []
        self._traits: list[Any] = []
        self._items: dict[str, Item] = {}  # without digests of content
        self._index: dict[str, int] = {}
        self._value_index: dict[str, int] = {}
        self._batches: list[list[int]] = []
        self._layouts: dict[Any, MeshLayout] = {}
        self._live: dict[str, LiveTensor] = {}
        self.values: dict[str, Json] = {}
        self.structure = ""

    def path_of(self, name: str) -> Path:
        """Return where a leaf stands."""
        return self._items[name].path

    def has_tensor(self, name: str) -> bool:
        """Whether this rank holds a tensor of this name."""
        return name in self._items and name not in self.values

    def look_at(self, state_dict: Mapping[Any, Any], *, rank: int, world_size: int) -> bool:
        """Take ``state_dict`` apart; return whether its structure is the one seen before.

        Raises:
            UnencodableStateError: A leaf cannot be saved; names it.
        """
        self._live = {}
        leaves = self._skeleton.leaves_of(state_dict) if self._skeleton else None
        same = (
            leaves is not None
            and (rank, world_size) == (self._rank, self._world_size)
            and _traits(leaves) == self._traits
        )
        if same and leaves is not None:
            self._leaves = leaves
        else:
            self._take_apart(state_dict, rank=rank, world_size=world_size)
        self.values = {
            name: CODEC.encode(self._leaves[i], name) for name, i in self._value_index.items()
        }
        return same

    def _take_apart(self, state_dict: Mapping[Any, Any], *, rank: int, world_size: int) -> None:
        self._skeleton = None
        self._rank, self._world_size = rank, world_size
        found = list(leaves_of(state_dict))
        self._leaves = [leaf for _, leaf, _ in found]
        self._layouts = {}
        self._items = {}
        for path, leaf, is_own in found:
            name = path_name(path)
            if isinstance(leaf, LIVE_TENSOR):
                live = describe_tensor(leaf, name, rank, self._layouts)
                self._items[name] = _tensor_item(path, live, is_own)
            else:
                self._items[name] = Item(kind="own" if is_own else "value", path=path)
        self._index = {name: i for i, name in enumerate(self._items)}
        leaves = self._leaves
        self._value_index = {
            name: i for name, i in self._index.items() if not isinstance(leaves[i], LIVE_TENSOR)
        }
        plain = (self._index[name] for name in self._plain_names())
        self._batches = _batches({i: leaves[i] for i in plain})
        self._traits = _traits(leaves)
        self.structure = Summary(self._items).fingerprint()
        self._skeleton = StateSkeleton(state_dict)

    def forget(self) -> None:
        """Let go of the live tensors; the structure stays known."""
        self._leaves, self._live = [], {}

    def live(self, name: str) -> LiveTensor:
        """Return a tensor as it is now."""
        if name not in self._live:
            leaf = self._leaves[self._index[name]]
            self._live[name] = describe_tensor(leaf, name, self._rank, self._layouts)
        return self._live[name]

    def local_dtensor(self, name: str) -> torch.Tensor | None:
        """Return this rank's part of a DTensor, of which it has one; ``None`` for other tensors.

        Its layout is not looked at: it was compared when the structure was found to be the same.
        """
        leaf = self._leaves[self._index[name]]
        if not isinstance(leaf, DTensor):
            return None
        return plain_tensor(leaf.to_local().detach(), name)

    def content(self) -> str:
        """Return a digest of everything that is expected to be equal on all ranks.

        That is every value and every plain tensor, but for what is declared rank-local.
        """
        shared = {n: v for n, v in self.values.items() if self._items[n].kind == "value"}
        hasher = xxhash.xxh3_64(json.dumps(shared, separators=(",", ":")).encode())
        for batch in self._batches:
            first, *others = [self._leaves[i] for i in batch]
            hasher.update(bytes_of(torch.stack([first, *others]) if others else first))
        return hasher.hexdigest()

    def bytes_by_name(self, names: Iterable[str]) -> dict[str, bytes]:
        """Return the content of tensors of which this rank holds all, row-major; meant for small ones."""
        by_index = {self._index[name]: name for name in names}
        tensors = {
            i: self.live(name).local if isinstance(self._leaves[i], DTensor) else self._leaves[i]
            for i, name in by_index.items()
        }
        found: dict[str, bytes] = {}
        for batch in _batches(tensors):
            content = bytes_of(torch.stack([tensors[i] for i in batch]))
            size = len(content) // len(batch)
            for k, i in enumerate(batch):
                found[by_index[i]] = bytes(content[k * size : (k + 1) * size])
        return found

    def _plain_names(self) -> list[str]:
        if self._world_size == 1:
            return []
        return [n for n, i in self._items.items() if i.kind == "tensor" and i.layout is None]

    def _submesh_names(self) -> list[str]:
        """Return what other ranks may hold on a mesh of theirs."""
        layouts = ((name, item.layout) for name, item in self._items.items())
        return [n for n, layout in layouts if layout and len(layout.ranks) < self._world_size]

    def summary(self) -> Summary:
        """Return every leaf with its own digest: for ranks whose digests differ."""
        items = dict(self._items)
        for name in self._plain_names():
            content = xxhash.xxh3_64_hexdigest(bytes_of(self._leaves[self._index[name]]))
            items[name] = items[name].with_digest(content)
        for name in self._submesh_names():
            hasher = xxhash.xxh3_64()
            for _, part in self.live(name).parts:
                hasher.update(bytes_of(part))
            items[name] = items[name].with_digest(hasher.hexdigest())
        for name, value in self.values.items():
            if items[name].kind == "value":
                text = json.dumps(value, separators=(",", ":")).encode()
                items[name] = items[name].with_digest(xxhash.xxh3_64_hexdigest(text))
        return Summary(items)


def _tensor_item(path: Path, live: LiveTensor, is_own: bool) -> Item:
    if is_own:
        return Item(kind="own", path=path)
    return Item(kind="tensor", path=path, dtype=live.dtype, shape=live.shape, layout=live.layout)


def _traits(leaves: Sequence[Any]) -> list[Any]:
    """Return what must not change: kinds, and dtype, shape and sharding, or device, of tensors."""
    return [
        leaf._spec
        if isinstance(leaf, DTensor)
        else (type(leaf), leaf.dtype, leaf.shape, leaf.device)
        if isinstance(leaf, torch.Tensor)
        else (leaf.dtype, leaf.shape, leaf.layout)
        if isinstance(leaf, LocalShards)
        else type(leaf) is RankLocal
        for leaf in leaves
    ]


def _batches(tensors: Mapping[int, torch.Tensor]) -> list[list[int]]:
    """Put small tensors of one kind together: a model has thousands of step counts."""
    batches: dict[Any, list[int]] = {}
    for i, tensor in tensors.items():
        is_small = tensor.numel() <= _SMALL_ELEMENTS and type(tensor) is torch.Tensor
        kind = (tensor.dtype, tensor.shape, tensor.device) if is_small else i
        batches.setdefault(kind, []).append(i)
    return list(batches.values())


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's elements, row-major, in host memory."""
    host = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    return host.reshape(-1).view(torch.uint8).numpy().data
