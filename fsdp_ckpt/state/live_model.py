"""A model and its optimizer, whoever keeps them: always by the names of the plain model's tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from fsdp_ckpt.manifest.tree import Path
from fsdp_ckpt.state.flat_units import free_gathered
from fsdp_ckpt.state.model import ModelTensors, model_tensors
from fsdp_ckpt.state.optimizer import LiveOptimizer
from fsdp_ckpt.state.parameters import Views, parameter_views
from fsdp_ckpt.state.saved import RestorePlan, subtree

__all__ = ["LiveModel", "PlainModel", "apply_model"]


class LiveModel(Protocol):
    """What is saved and restored of a model and its optimizer."""

    @property
    def module(self) -> nn.Module:
        """The model."""

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """What steps the parameters."""

    def tensors(self) -> ModelTensors:
        """Take the model apart; called by every rank, changes nothing."""

    def views(self, known: Collection[str] = ()) -> Views:
        """Return the tensors in what the optimizer steps; a tied one by its first or a ``known`` name."""

    def live_optimizer(self, known: Collection[str] = ()) -> LiveOptimizer | None:
        """Return the optimizer by names, ``None`` where there is none.

        Raises:
            MismatchError: It optimizes a parameter that the model does not have.
        """

    def forget_gathered(self) -> None:
        """Let go of copies of what a restore has written."""

    def refresh(self) -> None:
        """Make up, from what a restore has written, whatever follows from it.

        Called by every rank, once all have written theirs: it may gather.
        """


@dataclass(frozen=True, slots=True)
class PlainModel:
    """A model that holds its parameters itself: plain, FSDP2, FSDP1, DDP.

    Args:
        module: The model.
        optimizer: Over its parameters.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer | None

    def tensors(self) -> ModelTensors:
        """See :class:`LiveModel`."""
        return model_tensors(self.module)

    def views(self, known: Collection[str] = ()) -> Views:
        """See :class:`LiveModel`."""
        return parameter_views(self.module, known)

    def live_optimizer(self, known: Collection[str] = ()) -> LiveOptimizer | None:
        """See :class:`LiveModel`."""
        if self.optimizer is None:
            return None
        return LiveOptimizer(self.optimizer, self.views(known))

    def forget_gathered(self) -> None:
        """See :class:`LiveModel`."""
        free_gathered(self.module)

    def refresh(self) -> None:
        """Nothing to do: what was written is what is used."""


def apply_model(live: LiveModel, plan: RestorePlan, leaves: Mapping[Path, Any]) -> None:
    """Put model and optimizer in place, once the plan's tensors are filled.

    Args:
        live: The model and its optimizer.
        plan: As planned.
        leaves: The plan's leaves, with the values in place.
    """
    live.forget_gathered()
    # What modules make up in their state_dict is theirs to take back.
    for name, detached in live.tensors().detached.items():
        inside = {path: leaf for path, leaf in leaves.items() if path[:2] == ("model", name)}
        if inside:
            detached.put(subtree(inside, "model", name))
    saved = subtree(leaves, "optimizer") or {}
    known = frozenset(name for g in saved.get("param_groups", {}).values() for name in g["params"])
    if (optimizer := live.live_optimizer(known)) is not None:
        optimizer.apply(saved, plan.fresh)
