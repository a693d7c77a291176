"""A model's tensors under names that no wrapper changes.

``torch.compile``, activation checkpointing, DDP and FSDP put a level of their own into the module tree.
A *name* here leaves these levels out, by walking the modules, never by matching text: a user's own
submodule may well be called ``module``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["ModelTensors", "canonical_name", "model_tensors", "parameter_names"]

_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def canonical_name(model: nn.Module, key: str) -> str:
    """Return the name of a ``state_dict`` key or parameter without the wrappers' levels.

    Args:
        model: The model that the key is of.
        key: Dotted key; a wrapper that already leaves its own level out is fine.
    """
    kept: list[str] = []
    module: nn.Module | None = model
    for part in key.split("."):
        while module is not None and (inner := _wrapped_attribute(module)) is not None:
            module = module._modules[inner]
            if part == inner:
                break
        else:
            kept.append(part)
            module = None if module is None else module._modules.get(part)
    return ".".join(kept)


def _wrapped_attribute(module: nn.Module) -> str | None:
    """Return the attribute under which a wrapper holds the user's module."""
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return "module"
    return next((name for name in _WRAPPED if name in module._modules), None)


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Return ``id`` of each parameter → its name; of a tied one the first name."""
    names: dict[int, str] = {}
    for key, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), canonical_name(model, key))
    return names


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """What a model's ``state_dict`` holds.

    Args:
        tensors: Name → live parameter or buffer, each tensor once, under its first name.
        tied: Further name → first name, where two names are one tensor.
        detached: Name → (key, value) of what a module makes up in its ``state_dict``: ``_extra_state``,
            values, tensors that are neither parameter nor buffer.
    """

    tensors: dict[str, torch.Tensor]
    tied: dict[str, str]
    detached: dict[str, tuple[str, Any]]

    def state_dict(self) -> dict[str, Any]:
        """Return name → tensor or value; shares memory with the model."""
        detached = {name: value for name, (_, value) in self.detached.items()}
        return {**{name: t.detach() for name, t in self.tensors.items()}, **detached}


def model_tensors(model: nn.Module) -> ModelTensors:
    """Take a model's ``state_dict`` apart; changes nothing.

    Non-persistent buffers are not in it. Called by every rank: FSDP may reshard what a forward has left
    gathered.
    """
    live = {id(t) for t in _parameters_and_buffers(model)}
    found = ModelTensors({}, {}, {})
    first_names: dict[int, str] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        name = canonical_name(model, key)
        if id(value) not in live:
            found.detached[name] = (key, value)
        elif (first := first_names.setdefault(id(value), name)) != name:
            found.tied[name] = first
        else:
            found.tensors[name] = value
    return found


def _parameters_and_buffers(model: nn.Module) -> Iterator[torch.Tensor]:
    for module in model.modules():
        yield from (p for p in module._parameters.values() if p is not None)
        yield from (b for b in module._buffers.values() if b is not None)
