"""The leaves of a live state dict: tensors, values, and what is declared rank-local."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fsdp_ckpt.manifest.skeleton import Skeleton
from fsdp_ckpt.manifest.tree import Path, flatten
from fsdp_ckpt.state.local_shards import LocalShards
from fsdp_ckpt.state.rank_local import RankLocal

__all__ = ["LIVE_TENSOR", "StateSkeleton", "leaves_of", "set_leaf"]

LIVE_TENSOR = (torch.Tensor, LocalShards)  # for isinstance


def leaves_of(state_dict: Mapping[Any, Any]) -> Iterator[tuple[Path, Any, bool]]:
    """Yield (path, leaf, declared rank-local) of the whole state.

    Raises:
        UnencodableStateError: Names that meet, keys of other types above a tensor, a cycle.
    """
    for path, leaf in flatten(state_dict, _is_target).items():
        if not isinstance(leaf, RankLocal):
            yield path, leaf, False
            continue
        # Its content is taken apart as if it stood at the mark's place.
        for (_, *rest), value in flatten({"": leaf.value}, _is_live).items():
            yield (*path, *rest), value, True


def _is_live(value: Any) -> bool:
    return isinstance(value, LIVE_TENSOR)


def _is_target(value: Any) -> bool:
    return isinstance(value, (*LIVE_TENSOR, RankLocal))


class StateSkeleton:
    """A state dict's structure, to take apart the next one of the same structure in microseconds."""

    def __init__(self, state_dict: Mapping[Any, Any]) -> None:
        self._outer = Skeleton(state_dict, _is_target)
        leaves = self._outer.leaves_of(state_dict) or []
        self._inner = {
            i: Skeleton({"": leaf.value}, _is_live)
            for i, leaf in enumerate(leaves)
            if isinstance(leaf, RankLocal)
        }

    def leaves_of(self, state_dict: Mapping[Any, Any]) -> list[Any] | None:
        """Return the leaves in :func:`leaves_of`'s order, or ``None`` if the structure is another one."""
        outer = self._outer.leaves_of(state_dict)
        if outer is None or not self._inner:
            return outer
        found: list[Any] = []
        done = 0
        for i, skeleton in self._inner.items():
            if not isinstance(outer[i], RankLocal):
                return None
            inner = skeleton.leaves_of({"": outer[i].value})
            if inner is None:
                return None
            found.extend(outer[done:i])
            found.extend(inner)
            done = i + 1
        found.extend(outer[done:])
        return found


def set_leaf(node: Any, path: Path, value: Any) -> Any:
    """Put ``value`` at ``path`` below ``node``, in place; return it, or a new one if immutable."""
    if isinstance(node, RankLocal):
        return RankLocal(set_leaf(node.value, path, value))
    if not path:
        return value
    part, *rest = path
    child = set_leaf(node[part], tuple(rest), value)
    if isinstance(node, tuple):
        return (*node[:part], child, *node[part + 1 :])
    node[part] = child
    return node
