"""An optimizer's state by parameter name, read and written directly.

``torch.distributed.checkpoint.state_dict`` takes a dummy step to make a fresh optimizer's state, which moves
the step count and can move weights; ``Optimizer.load_state_dict`` casts moments to the parameter's dtype.
Here ``optimizer.state`` is read as it is, and set to exactly what was saved.

FSDP1's flat parameters are taken apart by their views. ``ZeroRedundancyOptimizer`` keeps each rank's
partition in an optimizer of its own, and that one's state is read; its groups list all parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor import empty as empty_dtensor

from fsdp_ckpt.errors import MismatchError, UnencodableStateError
from fsdp_ckpt.state.local_shards import LocalShards
from fsdp_ckpt.state.parameters import ParameterView, Views
from fsdp_ckpt.state.saved import SavedTensor

__all__ = ["LiveOptimizer", "Slot"]

# Kept by Optimizer.add_param_group for its own use; not a hyperparameter.
_NOT_HYPERPARAMETERS = ("params", "param_names")


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor of the model in an optimizer.

    Args:
        view: Which tensor, and where in the live parameter.
        parameter: The live parameter.
        group: Its parameter group.
        is_local: Whether this rank keeps its state: ZeRO gives every parameter to one rank, FSDP1 gives some
            ranks no elements.
    """

    view: ParameterView
    parameter: torch.Tensor
    group: Mapping[str, Any]
    is_local: bool


class LiveOptimizer:
    """An optimizer, seen by the names of the model's tensors.

    Args:
        optimizer: Over the model's parameters.
        views: Of the model's live parameters.
        parameters: By group, where the optimizer's own groups do not list them: ZeRO-3 fills them only while
            it makes a step. All are this rank's.

    Raises:
        MismatchError: It optimizes a parameter that the model does not have.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        views: Views,
        parameters: Sequence[Sequence[torch.Tensor]] | None = None,
    ) -> None:
        self._optimizer = optimizer
        inner = getattr(optimizer, "optim", None)
        # ZeroRedundancyOptimizer: the state of this rank's own partition.
        self._local = inner if isinstance(inner, torch.optim.Optimizer) else optimizer
        listed = [group["params"] for group in optimizer.param_groups]
        partition = [group["params"] for group in self._local.param_groups]
        mine = {id(p) for group in parameters or partition for p in group}
        self.groups: list[list[Slot]] = []
        for i, group in enumerate(optimizer.param_groups):
            slots = []
            for parameter in (parameters or listed)[i]:
                if id(parameter) not in views:
                    raise MismatchError(
                        f"optimizer: group {i} holds a parameter of shape {list(parameter.shape)}, not "
                        "the model's; build the optimizer after wrapping the model, from model.parameters()"
                    )
                # FSDP1 never steps a parameter of which this rank has no elements: a state would go stale.
                is_empty = views[id(parameter)][0].layout is not None and not parameter.numel()
                is_local = id(parameter) in mine and not is_empty
                slots += [Slot(view, parameter, group, is_local) for view in views[id(parameter)]]
            self.groups.append(slots)

    @property
    def slots(self) -> dict[str, Slot]:
        """Every slot by its tensor's name."""
        return {slot.view.name: slot for slots in self.groups for slot in slots}

    def state_of(self, slot: Slot) -> dict[str, Any]:
        """Return the live state of a slot's parameter, empty where there is none."""
        found: dict[str, Any] = self._local.state.get(slot.parameter, {})
        return found

    def collect(self) -> dict[str, Any]:
        """Return ``{"state": {name: {...}}, "param_groups": {first name: {...}}}``, with the live tensors.

        Groups go by their first parameter, so that those of pipeline stages complete each other. Parameters
        without state (frozen, never stepped, SGD) have none in it; frozen ones that have some
        keep it.
        """
        known = {id(slot.parameter) for slots in self.groups for slot in slots}
        for key in self._local.state:
            if id(key) not in known and self._local.state[key]:
                raise UnencodableStateError(
                    f"optimizer.state: an entry under {str(key)[:60]!r}, no parameter of its groups, has no "
                    "name to be saved under; keep it in the parameters' state, or in an extra",
                    key="optimizer.state",
                )
        state = {
            slot.view.name: {k: _leaf(slot, v) for k, v in found.items()}
            for slots in self.groups
            for slot in slots
            if (found := self.state_of(slot))
        }
        param_groups = {
            slots[0].view.name: {
                "params": [slot.view.name for slot in slots],
                **{k: v for k, v in group.items() if k not in _NOT_HYPERPARAMETERS},
            }
            for slots, group in zip(self.groups, self._optimizer.param_groups, strict=True)
            if slots
        }
        return {"state": state, "param_groups": param_groups}

    def target(
        self,
        slot: Slot,
        key: str,
        *,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        placements: Sequence[Placement] | None,
        fresh: dict[tuple[int, str], torch.Tensor],
    ) -> torch.Tensor | LocalShards:
        """Return where a saved state tensor goes: the live one, or memory that goes live in :meth:`apply`.

        Args:
            slot: Whose state.
            key: State key, such as ``exp_avg``.
            shape: Global shape, as saved.
            dtype: As saved.
            placements: Of the saved DTensor, or ``None`` where it was plain.
            fresh: (id of the live parameter, key) → memory made so far; several slots of a flat parameter
                share it.
        """
        live = self.state_of(slot).get(key)
        if isinstance(live, torch.Tensor):
            # Its dtype and shape are then compared like the model's.
            leaf: torch.Tensor | LocalShards = _leaf(slot, live)
            # What the tensors of a flat parameter share goes to memory of its own, for apply to compare.
            if slot.view.layout is None or isinstance(leaf, LocalShards):
                return leaf
        if slot.view.layout is not None and shape == slot.view.shape:
            where = (id(slot.parameter), key)
            if where not in fresh:
                # Zeros: FSDP1 pads flat parameters, and no one else writes the padding.
                like = slot.parameter.detach()
                fresh[where] = torch.zeros(like.shape, dtype=dtype, device=like.device)
            return slot.view.of(fresh[where])
        return _empty(slot, key, shape=shape, dtype=dtype, placements=placements)

    def apply(
        self, saved: Mapping[str, Any], fresh: Mapping[tuple[int, str], torch.Tensor]
    ) -> None:
        """Set the state to exactly ``saved``; no step, no cast.

        Args:
            saved: As :meth:`collect` returned it, its tensors filled.
            fresh: As :meth:`target` made it.

        Raises:
            MismatchError: Tensors of one flat parameter come with different step counts.
        """
        state = saved.get("state", {})
        by_parameter: dict[int, list[Slot]] = {}
        for slots in self.groups:
            for slot in slots:
                if slot.is_local:
                    by_parameter.setdefault(id(slot.parameter), []).append(slot)
        for slots in by_parameter.values():
            self._apply_state(slots, [state.get(slot.view.name) or {} for slot in slots], fresh)
        source_of = {n: g for g in saved.get("param_groups", {}).values() for n in g["params"]}
        for slots, group in zip(self.groups, self._optimizer.param_groups, strict=True):
            names = (slot.view.name for slot in slots)
            source = next((source_of[name] for name in names if name in source_of), None)
            if source is not None:
                _apply_hyperparameters(group, source)

    def _apply_state(
        self,
        slots: Sequence[Slot],
        saved: Sequence[Mapping[str, Any]],
        fresh: Mapping[tuple[int, str], torch.Tensor],
    ) -> None:
        parameter = slots[0].parameter
        live = self._local.state.get(parameter, {})
        new: dict[str, Any] = {}
        for slot, found in zip(slots, saved, strict=True):
            for key, value in found.items():
                if isinstance(value, LocalShards):
                    whole = fresh.get((id(parameter), key))
                    new[key] = live[key] if whole is None else whole
                elif key not in new:
                    new[key] = value
                elif not _equal(new[key], value):
                    raise MismatchError(
                        f"optimizer.state.{slot.view.name}.{key} is {value}, of other tensors in its flat "
                        f"parameter {new[key]}; resume where each tensor has its own: use_orig_params=True",
                        key=slot.view.name,
                    )
        for slot, found in zip(slots, saved, strict=True):
            for key in new.keys() - found.keys():
                # A tensor that comes without state starts at zero.
                if isinstance(part := _leaf(slot, new[key]), LocalShards):
                    part.local.zero_()
        if new:
            self._local.state[parameter] = new
        else:
            self._local.state.pop(parameter, None)

    def undecidable_groups(self, saved_groups: Collection[Mapping[str, Any]]) -> Iterator[str]:
        """Yield what keeps the saved groups' hyperparameters from the live groups."""
        groups = list(saved_groups)
        index_of = {name: i for i, g in enumerate(groups) for name in g["params"]}
        for i, slots in enumerate(self.groups):
            names = (slot.view.name for slot in slots)
            sources = sorted({index_of[name] for name in names if name in index_of})
            # Pipeline stages have a group each where one process has one.
            if any(not _have_equal_options(groups[sources[0]], groups[j]) for j in sources[1:]):
                yield (
                    f"optimizer.param_groups: group {i} here holds parameters of {len(sources)} saved groups "
                    f"({', '.join(map(str, sources))}); which hyperparameters they get is not decidable"
                )


def _have_equal_options(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two saved groups have the same hyperparameters, as far as is known before data is read."""
    keys = (a.keys() | b.keys()) - set(_NOT_HYPERPARAMETERS)
    values = [(a.get(key), b.get(key)) for key in keys]
    return all(not isinstance(v, SavedTensor) and v == w for v, w in values)


def _leaf(slot: Slot, value: Any) -> Any:
    """Return a state value in the model's terms: what has the live parameter's shape is laid out like it."""
    if isinstance(value, torch.Tensor) and value.shape == slot.parameter.shape:
        return slot.view.of(value)
    return value


def _empty(
    slot: Slot,
    key: str,
    *,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    placements: Sequence[Placement] | None,
) -> torch.Tensor:
    parameter, group = slot.parameter, slot.group
    # torch.optim keeps the step count on the host, unless its kernels read it on the device.
    if key == "step" and not (group.get("capturable") or group.get("fused")):
        return torch.empty(shape, dtype=dtype)
    if shape == tuple(parameter.shape):
        return torch.empty_like(parameter.detach(), dtype=dtype)
    if placements is not None and isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        fitting = placements if len(placements) == mesh.ndim else [Replicate()] * mesh.ndim
        return empty_dtensor(*shape, dtype=dtype, device_mesh=mesh, placements=fitting)
    return torch.empty(shape, dtype=dtype, device=parameter.device)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    return bool(a == b)


def _apply_hyperparameters(group: dict[str, Any], source: Mapping[str, Any]) -> None:
    for key, value in source.items():
        if key in _NOT_HYPERPARAMETERS:
            continue
        if isinstance(group.get(key), torch.Tensor):
            group[key].copy_(torch.as_tensor(value))  # a captured graph reads this very tensor
        else:
            group[key] = value
