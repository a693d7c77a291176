"""What a checkpoint offers to the live state, and what the live state takes of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import Placement

from fsdp_ckpt.manifest.tree import Path, unflatten

__all__ = ["RUN_SECTION", "RestorePlan", "SavedState", "SavedTensor", "subtree"]

# First element of the paths of what the run knew of itself, beside the training state.
RUN_SECTION = "run"


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor in a checkpoint.

    Args:
        shape: Global shape.
        dtype: As saved.
        placements: Of the DTensor it was, or ``None`` where every rank held all of it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: tuple[Placement, ...] | None


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """A checkpoint's content, before any data is read.

    Args:
        tensors: Global tensors by path.
        values: Global values by path.
        own: Paths of which every rank that saved has its own.
        varying: Paths with a global content from which some ranks differ.
        world_size: Number of ranks that saved.
        seed: The same for everyone who reads this checkpoint; for random streams of new ranks.
    """

    tensors: Mapping[Path, SavedTensor]
    values: Mapping[Path, Any]
    own: frozenset[Path]
    varying: frozenset[Path]
    world_size: int
    seed: int

    def under(self, *prefix: str) -> Iterator[Path]:
        """Yield every saved path that starts with ``prefix``, or is it."""
        for path in (*self.tensors, *self.values, *self.own):
            if path[: len(prefix)] == prefix:
                yield path


@dataclass(slots=True)
class RestorePlan:
    """What the live state takes from a checkpoint.

    Args:
        leaves: Saved path → tensor to fill (live, or fresh memory that goes live later), or ``None`` for
            what is handed over as a value.
        copies: (live tensor, live tensor to copy it from afterwards): untied here, tied in the checkpoint.
        problems: What makes the restore impossible, one line each.
        missing: Names of the live state that the checkpoint lacks.
        derived: Names that are restored from another rank's content, or made up deterministically.
        dropped: Names that are left out, as the caller allows.
        left_out: Saved paths that this rank passes over on purpose.
        resharded: Name of a part → its state on this rank, once the caller's function has shared out the
            saved ones; ``None`` until then.
        fresh: (id of a live flat parameter, state key) → memory that goes live later.
    """

    leaves: dict[Path, Any] = field(default_factory=dict)
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    derived: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    left_out: list[Path] = field(default_factory=list)
    resharded: dict[str, Any] = field(default_factory=dict)
    fresh: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)


def subtree(leaves: Mapping[Path, Any], *prefix: str) -> Any:
    """Rebuild the part of a state below ``prefix``: nested containers, or the one value that stands there."""
    inside = {path: leaf for path, leaf in leaves.items() if path[: len(prefix)] == prefix}
    return unflatten((("", *path[len(prefix) :]), leaf) for path, leaf in inside.items()).get("")
