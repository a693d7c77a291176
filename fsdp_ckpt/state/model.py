"""A model's tensors and values by name, from its ``state_dict``, or from FSDP1's flat parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_ckpt.state.flat_units import FlatUnit, flat_units
from fsdp_ckpt.state.local_shards import LocalShards
from fsdp_ckpt.state.names import canonical_name

__all__ = ["Detached", "ModelTensors", "model_tensors"]


@dataclass(frozen=True, slots=True)
class Detached:
    """Something that a module makes up in its ``state_dict``: ``_extra_state``, values, computed tensors.

    Args:
        value: What it is now.
        put: Hands a value back to the module.
    """

    value: Any
    put: Callable[[Any], object]


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """What a model holds.

    Args:
        tensors: Name → live parameter or buffer, each tensor once, under its first name.
        tied: Further name → first name, where two names are one tensor.
        detached: Name → what is neither parameter nor buffer.
    """

    tensors: dict[str, torch.Tensor | LocalShards]
    tied: dict[str, str]
    detached: dict[str, Detached]

    def state_dict(self) -> dict[str, Any]:
        """Return name → tensor or value; shares memory with the model."""
        return {**self.tensors, **{name: d.value for name, d in self.detached.items()}}


def model_tensors(model: nn.Module) -> ModelTensors:
    """Take a model apart; changes nothing.

    Non-persistent buffers are not in it. Called by every rank: FSDP2 may reshard what a forward has left
    gathered. FSDP1 is read without any collective.
    """
    units = flat_units(model)
    return _from_units(model, units) if units else _from_state_dict(model)


def _from_state_dict(model: nn.Module) -> ModelTensors:
    found = ModelTensors({}, {}, {})
    first_names: dict[int, str] = {}
    # First, since it makes FSDP2 put its shards back in place of what a forward has left gathered.
    state = model.state_dict(keep_vars=True)
    live = {id(t) for m in model.modules() for t in _own_tensors(m)}
    for key, value in state.items():
        name = canonical_name(model, key)
        if id(value) not in live:
            found.detached[name] = Detached(value, _loader(model, key))
        else:
            _add(found, first_names, name, value)
    return found


def _loader(model: nn.Module, key: str) -> Callable[[Any], object]:
    return lambda value: model.load_state_dict({key: value}, strict=False)


def _add(found: ModelTensors, first_names: dict[int, str], name: str, tensor: torch.Tensor) -> None:
    first = first_names.setdefault(id(tensor), name)
    if first == name:
        found.tensors[name] = tensor
    else:
        found.tied[name] = first


def _own_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from (p for p in module._parameters.values() if p is not None)
    yield from (b for b in module._buffers.values() if b is not None)


def _from_units(model: nn.Module, units: list[FlatUnit]) -> ModelTensors:
    """FSDP1's own ``state_dict`` would gather; walk the modules instead."""
    found = ModelTensors({}, {}, {})
    flat: set[int] = set()
    for unit in units:
        found.tensors.update(unit.tensors())
        found.tied.update(unit.tied)
        flat.add(id(unit.flat_param))
        flat.update(id(part.parameter) for part in unit.parts if part.parameter is not None)
    first_names: dict[int, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        kept = {**module._parameters, **module._buffers}
        for key, tensor in kept.items():
            if tensor is None or id(tensor) in flat or key in module._non_persistent_buffers_set:
                continue
            name = canonical_name(model, prefix + key)
            if name not in found.tensors and name not in found.tied:
                _add(found, first_names, name, tensor)
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            name = canonical_name(model, f"{prefix}_extra_state")
            found.detached[name] = Detached(module.get_extra_state(), module.set_extra_state)
    return found
