"""The parameters that an optimizer sees, in the terms of the model's tensors.

Usually one live parameter is one tensor of the model. FSDP1 flattens several into one, so that a live
parameter is several tensors (``use_orig_params=False``), or a range of one (``use_orig_params=True``).
A :class:`ParameterView` says which part of a live parameter, or of a state tensor of its shape, is which
tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn

from fsdp_ckpt.plan.flat import FlatLayout
from fsdp_ckpt.state.flat_units import FlatUnit, flat_units
from fsdp_ckpt.state.local_shards import LocalShards
from fsdp_ckpt.state.names import canonical_name

__all__ = ["ParameterView", "Views", "parameter_views"]


@dataclass(frozen=True, slots=True)
class ParameterView:
    """One tensor of the model in a live parameter.

    Args:
        name: The tensor's name.
        shape: Its global shape.
        layout: How ranks hold it, where the live parameter is flat; else ``None``.
        rank: This rank.
        start: Where its elements begin in the live flat parameter.
        stop: Where they end.
    """

    name: str
    shape: tuple[int, ...]
    layout: FlatLayout | None = None
    rank: int = 0
    start: int = 0
    stop: int = 0

    def of(self, tensor: torch.Tensor) -> torch.Tensor | LocalShards:
        """Return this tensor's part of ``tensor``, which has the live parameter's shape."""
        if self.layout is None:
            return tensor
        part = tensor.detach()[self.start : self.stop]
        return LocalShards.of(self.shape, self.layout, self.rank, part)


Views: TypeAlias = Mapping[int, list[ParameterView]]


def parameter_views(
    model: nn.Module, known: Collection[str] = ()
) -> dict[int, list[ParameterView]]:
    """Return ``id`` of each live parameter → the tensors in it.

    A tied tensor has its first name, or the first that is ``known``.
    """
    units = flat_units(model)
    views: dict[int, list[ParameterView]] = {}
    for unit in units:
        _add_unit(views, unit)
    for key, parameter in model.named_parameters(remove_duplicate=False):
        name = canonical_name(model, key)
        found = views.get(id(parameter))
        if found is None or (
            found[0].layout is None and found[0].name not in known and name in known
        ):
            views[id(parameter)] = [ParameterView(name, tuple(parameter.shape))]
    return views


def _add_unit(views: dict[int, list[ParameterView]], unit: FlatUnit) -> None:
    for part in unit.parts:
        low, high = part.layout.range_of(part.shape, unit.rank)
        first = part.offset_in_shard
        common = (part.name, part.shape, part.layout, unit.rank)
        views.setdefault(id(unit.flat_param), []).append(
            ParameterView(*common, start=first, stop=first + high - low)
        )
        if part.parameter is not None:
            views[id(part.parameter)] = [ParameterView(*common, start=0, stop=high - low)]
