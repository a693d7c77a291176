"""An optimizer's state by parameter name, read and written directly.

``torch.distributed.checkpoint.state_dict`` takes a dummy step to make a fresh optimizer's state, which moves
the step count and can move weights; ``Optimizer.load_state_dict`` casts moments to the parameter's dtype.
Here ``optimizer.state`` is read as it is, and set to exactly what was saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor import empty as empty_dtensor

from fsdp_ckpt.errors import MismatchError

__all__ = ["apply_optimizer", "collect_optimizer", "empty_state_tensor", "named_parameters_of"]

# Kept by Optimizer.add_param_group for its own use; not a hyperparameter.
_NOT_HYPERPARAMETERS = ("params", "param_names")


def named_parameters_of(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> list[list[tuple[str, torch.nn.Parameter]]]:
    """Return (name, parameter) per parameter group.

    Args:
        optimizer: The optimizer.
        names: ``id`` of each of the model's parameters → name.

    Raises:
        MismatchError: It optimizes a parameter that the model does not have.
    """
    groups = []
    for i, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise MismatchError(
                    f"optimizer: group {i} holds a parameter of shape {list(parameter.shape)} that is not "
                    "the model's; build the optimizer after wrapping the model, from model.parameters()"
                )
        groups.append([(names[id(p)], p) for p in group["params"]])
    return groups


def collect_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> dict[str, Any]:
    """Return ``{"state": {name: {...}}, "param_groups": [...]}``; tensors are the live ones.

    Parameters without state (frozen, never stepped, SGD) have none in it; frozen ones that have some keep it.
    """
    groups = named_parameters_of(optimizer, names)
    state = {
        name: dict(optimizer.state[parameter])
        for group in groups
        for name, parameter in group
        if optimizer.state.get(parameter)
    }
    param_groups = [
        {
            "params": [name for name, _ in named],
            **{k: v for k, v in group.items() if k not in _NOT_HYPERPARAMETERS},
        }
        for named, group in zip(groups, optimizer.param_groups, strict=True)
    ]
    return {"state": state, "param_groups": param_groups}


def empty_state_tensor(
    parameter: torch.nn.Parameter,
    group: Mapping[str, Any],
    key: str,
    *,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    placements: Sequence[Placement] | None,
) -> torch.Tensor:
    """Allocate a state tensor for a parameter whose optimizer has none yet.

    Args:
        parameter: Live parameter; what has its shape is sharded as it is.
        group: The parameter's group.
        key: State key, such as ``exp_avg``.
        shape: Global shape.
        dtype: As saved.
        placements: Of the saved DTensor, or ``None`` where it was plain.
    """
    if shape == tuple(parameter.shape):
        return torch.empty_like(parameter.detach(), dtype=dtype)
    if placements is not None and isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        fitting = placements if len(placements) == mesh.ndim else [Replicate()] * mesh.ndim
        return empty_dtensor(*shape, dtype=dtype, device_mesh=mesh, placements=fitting)
    # torch.optim keeps the step count on the host, unless its kernels read it on the device.
    on_device = key != "step" or group.get("capturable") or group.get("fused")
    return torch.empty(shape, dtype=dtype, device=parameter.device if on_device else "cpu")


def apply_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], saved: Mapping[str, Any]
) -> None:
    """Set the optimizer's state to exactly ``saved``; no step, no cast.

    Args:
        optimizer: The live optimizer.
        names: ``id`` of each of the model's parameters → name.
        saved: As :func:`collect_optimizer` returned it, its tensors on their devices.
    """
    state = saved.get("state", {})
    saved_group_of = {name: g for g in saved.get("param_groups", []) for name in g["params"]}
    groups = named_parameters_of(optimizer, names)
    for named, group in zip(groups, optimizer.param_groups, strict=True):
        for name, parameter in named:
            if state.get(name):
                optimizer.state[parameter] = dict(state[name])
            else:
                optimizer.state.pop(parameter, None)
        source = next((saved_group_of[name] for name, _ in named if name in saved_group_of), None)
        if source is not None:
            _apply_hyperparameters(group, source)


def _apply_hyperparameters(group: dict[str, Any], source: Mapping[str, Any]) -> None:
    for key, value in source.items():
        if key in _NOT_HYPERPARAMETERS:
            continue
        if isinstance(group.get(key), torch.Tensor):
            group[key].copy_(torch.as_tensor(value))  # a captured graph reads this very tensor
        else:
            group[key] = value


def split_groups(
    groups: Sequence[Sequence[tuple[str, torch.nn.Parameter]]], saved_groups: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Yield what keeps the saved groups' hyperparameters from the live groups."""
    saved_index = {name: i for i, g in enumerate(saved_groups) for name in g["params"]}
    for i, named in enumerate(groups):
        sources = sorted({saved_index[name] for name, _ in named if name in saved_index})
        if len(sources) > 1:
            yield (
                f"optimizer.param_groups: group {i} here holds parameters of {len(sources)} saved groups "
                f"({', '.join(map(str, sources))}); which hyperparameters they should have is not decidable"
            )
