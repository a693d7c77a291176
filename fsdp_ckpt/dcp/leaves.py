"""The leaves of a live state dict: tensors, values, and what is declared rank-local."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fsdp_ckpt.manifest.tree import Path, flatten
from fsdp_ckpt.state.local_shards import LocalShards
from fsdp_ckpt.state.rank_local import RankLocal

__all__ = ["LIVE_TENSOR", "leaves_of", "set_leaf"]

LIVE_TENSOR = (torch.Tensor, LocalShards)  # for isinstance


def leaves_of(state_dict: Mapping[Any, Any]) -> Iterator[tuple[Path, Any, bool]]:
    """Yield (path, leaf, declared rank-local) of the whole state.

    Raises:
        UnencodableStateError: Names that meet, keys of other types above a tensor, a cycle.
    """
    for path, leaf in flatten(state_dict, lambda v: isinstance(v, (*LIVE_TENSOR, RankLocal))).items():
        if not isinstance(leaf, RankLocal):
            yield path, leaf, False
            continue
        # Its content is taken apart as if it stood at the mark's place.
        for (_, *rest), value in flatten(
            {"": leaf.value}, lambda v: isinstance(v, LIVE_TENSOR)
        ).items():
            yield (*path, *rest), value, True


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
