"""What one rank puts into its shard file, whichever planner decided it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from fsdp_ckpt.manifest.tree import Path
from fsdp_ckpt.manifest.typed_json import Json
from fsdp_ckpt.plan.image import Entry, ImageLayout

__all__ = ["Contents"]


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What one rank puts into its shard file.

    Args:
        layout: Entries and where they lie.
        paths: Entry name → where the tensor stands.
        resolve: Entry → live local tensor of the chunk's shape.
        own: Names of entries that are this rank's own.
        own_values: This rank's own values, typed JSON by path.
        inline: Reads the tensors that the manifest holds too; returns name → content on rank 0.
        global_values: Global values of which this rank's is the one that counts.
    """

    layout: ImageLayout
    paths: Mapping[str, Path]
    resolve: Callable[[Entry], torch.Tensor]
    own: frozenset[str] = frozenset()
    own_values: Mapping[Path, Json] = field(default_factory=dict)
    inline: Callable[[], Mapping[str, bytes]] = dict
    global_values: Mapping[Path, Json] = field(default_factory=dict)
