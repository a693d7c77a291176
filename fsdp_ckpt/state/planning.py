"""Where each part of a checkpoint goes in the live state; allocates, but changes nothing live.

Each function adds to a :class:`RestorePlan`: the memory for what fits, the names of what is missing, and a
line for every difference that makes the restore impossible.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_ckpt.errors import MismatchError
from fsdp_ckpt.manifest.tree import Path, flatten, path_name
from fsdp_ckpt.state.data import ResumableSampler
from fsdp_ckpt.state.local_shards import LocalShards
from fsdp_ckpt.state.model import ModelTensors
from fsdp_ckpt.state.optimizer import LiveOptimizer
from fsdp_ckpt.state.progress import Progress
from fsdp_ckpt.state.saved import RestorePlan, SavedState, SavedTensor, subtree
from fsdp_ckpt.state.stateful import Stateful

__all__ = [
    "Resize",
    "plan_model",
    "plan_optimizer",
    "plan_part",
    "plan_random_states",
    "saved_groups",
]


def plan_model(live: ModelTensors, saved: SavedState, plan: RestorePlan) -> None:
    """Plan parameters, buffers, ties, and what modules make up."""
    tied = {path[1:]: first for path, first in saved.values.items() if path[:1] == ("tied",)}
    first_of = {".".join(map(str, path)): first for path, first in tied.items()}
    plan.leaves.update(dict.fromkeys(saved.under("tied")))
    names_here: dict[str, list[str]] = {name: [name] for name in live.tensors}
    for name, first in live.tied.items():
        names_here[first].append(name)
    for first, names in names_here.items():
        known = (n for n in names if n in first_of or ("model", n) in saved.tensors)
        sources = {first_of.get(n, n) for n in known}
        if len(sources) > 1:
            plan.problems.append(
                f"model.{first}: {' and '.join(names)} are one tensor here, {len(sources)} in the checkpoint"
            )
            continue
        _plan_tensor(first, ("model", next(iter(sources), first)), live.tensors[first], plan)
    # What a module makes up may be nested itself.
    inside: dict[str, list[Path]] = {name: [] for name in live.detached}
    for saved_path in saved.under("model"):
        if saved_path[1] in inside:
            inside[saved_path[1]].append(saved_path)
    for name, paths in inside.items():
        for path in paths or [("model", name)]:
            plan.leaves[path] = _allocate(path, saved, None)


def _plan_tensor(
    name: str, path: Path, tensor: torch.Tensor | LocalShards, plan: RestorePlan
) -> None:
    """Fill the live ``tensor`` from ``path``; the second tensor of one path is copied from the first."""
    source = plan.leaves.setdefault(path, tensor)
    if source is tensor:
        return
    if not (isinstance(tensor, torch.Tensor) and isinstance(source, torch.Tensor)):
        plan.problems.append(
            f"model.{name}: one tensor with {path[1]} in the checkpoint, two of flat parameters here"
        )
    elif (tensor.shape, tensor.dtype) != (source.shape, source.dtype):
        plan.problems.append(
            f"model.{name}: one tensor with {path[1]} in the checkpoint, here of another shape or dtype"
        )
    else:
        plan.copies.append((tensor, source))


def saved_groups(saved: SavedState) -> Collection[Mapping[str, Any]]:
    """Return the saved parameter groups, with the names of their parameters; tensors undelivered."""
    values = {
        path: value
        for path, value in (*saved.values.items(), *saved.tensors.items())
        if path[:2] == ("optimizer", "param_groups")
    }
    groups: Mapping[str, Mapping[str, Any]] = subtree(values, "optimizer", "param_groups") or {}
    return groups.values()


def plan_optimizer(optimizer: LiveOptimizer, saved: SavedState, plan: RestorePlan) -> None:
    """Plan the state of every parameter, and the groups."""
    slots = optimizer.slots
    for path in saved.under("optimizer"):
        if path[1:2] != ("state",) or len(path) == 2:
            plan.leaves[path] = _allocate(path, saved, None)
        elif path[2] not in slots:
            continue
        elif not slots[path[2]].is_local:
            plan.left_out.append(path)  # another rank's partition
        elif path in saved.tensors and len(path) == 4:
            offered = saved.tensors[path]
            plan.leaves[path] = optimizer.target(
                slots[path[2]],
                path[3],
                shape=offered.shape,
                dtype=offered.dtype,
                placements=offered.placements,
                fresh=plan.fresh,
            )
        else:
            plan.leaves[path] = _allocate(path, saved, None)
    groups = saved_groups(saved)
    plan.problems.extend(optimizer.undecidable_groups(groups))
    known = {name for group in groups for name in group["params"]}
    # Some frameworks leave out of their groups what is frozen; there is nothing to miss of it.
    plan.missing.extend(
        f"optimizer.{name}"
        for name, slot in slots.items()
        if name not in known and (slot.parameter.requires_grad or optimizer.state_of(slot))
    )


def plan_random_states(
    generators: Mapping[str, object], saved: SavedState, plan: RestorePlan
) -> None:
    """Plan the random states of a rank that existed at save time."""
    found = list(saved.under("rng"))
    if not found:
        plan.missing.append("rng")
        return
    named = {path[2] for path in found if path[1] == "named" and len(path) > 2}
    plan.missing.extend(f"rng.named.{name}" for name in generators if name not in named)
    for path in found:
        if path[1] != "named" or len(path) == 2 or path[2] in generators:
            plan.leaves[path] = None


@dataclass(frozen=True, slots=True)
class Resize:
    """What a change of the number of ranks means for a part.

    Args:
        resized: Whether another number of ranks saved.
        allowed: Whether the caller lets a name be missing.
        reshards: Whether the caller can share out the part's per-rank states.
    """

    resized: bool
    allowed: Callable[[str], bool]
    reshards: bool


def plan_part(
    prefix: tuple[str, ...], part: Stateful, saved: SavedState, plan: RestorePlan, how: Resize
) -> None:
    """Plan anything with a state dict of its own.

    Args:
        prefix: Where it stands, such as ``("extra", "ema")``.
        part: The live object.
        saved: What the checkpoint offers.
        plan: Is added to.
        how: What to do where per-rank states meet another number of ranks.
    """
    name = ".".join(prefix)
    paths = list(saved.under(*prefix))
    if not paths:
        plan.missing.append(name)
        return
    apart = [path for path in paths if path in saved.own or path in saved.varying]
    if how.resized and apart:
        if how.reshards:
            plan.resharded[name] = None
            plan.derived.append(name)
            plan.left_out.extend(paths)
            return
        if not how.allowed(name):
            plan.problems.append(
                f"{path_name(apart[0])}: differs per rank in the checkpoint of {saved.world_size} ranks; "
                f"give TrainState a reshard function for {name!r}, or restore without it by "
                f"allow_missing=[{name!r}]"
            )
            return
        if any(path in saved.own for path in apart):
            plan.dropped.append(name)
            plan.left_out.extend(paths)
            return
        plan.derived.append(name)
    if isinstance(part, nn.Module):
        _plan_module(prefix, part.state_dict(), paths, saved, plan)
        return
    if type(part) in (Progress, ResumableSampler):
        _try_values(name, part, subtree(saved.values, *prefix), plan)
    live = flatten({"": part.state_dict()}, lambda v: isinstance(v, torch.Tensor))
    for path in paths:
        plan.leaves[path] = _allocate(path, saved, live.get(("", *path[len(prefix) :])))


def _plan_module(
    prefix: tuple[str, ...],
    live: Mapping[str, Any],
    paths: Sequence[Path],
    saved: SavedState,
    plan: RestorePlan,
) -> None:
    """Compare a second module like the model: by name, shape and dtype."""
    known = {path[len(prefix)] for path in paths if len(path) > len(prefix)}
    plan.missing.extend(path_name((*prefix, key)) for key in live if key not in known)
    for path in paths:
        key = ".".join(map(str, path[len(prefix) : len(prefix) + 1]))
        here = live.get(key)
        is_tensor = path in saved.tensors and path not in saved.varying
        if is_tensor and isinstance(here, torch.Tensor) and not key.endswith("_extra_state"):
            plan.leaves[path] = torch.empty_like(here.detach())
        elif key in live or not key:
            plan.leaves[path] = _allocate(path, saved, here)


def _try_values(name: str, part: Any, content: Any, plan: RestorePlan) -> None:
    """Load into a copy, so that what the part refuses is known before anything is read or changed."""
    try:
        copy.copy(part).load_state_dict(content)
    except MismatchError as e:
        plan.problems.append(f"{name}: {e}")


def _allocate(path: Path, saved: SavedState, live: Any) -> torch.Tensor | None:
    """Return memory for a saved tensor: sharded and placed as the live one, plain where there is none.

    ``None`` for a value, and for a tensor from which ranks differ: it may differ in shape, so it is handed
    over as a value.
    """
    offered: SavedTensor | None = None if path in saved.varying else saved.tensors.get(path)
    if offered is None:
        return None
    if isinstance(live, DTensor) and tuple(live.shape) == offered.shape:
        return torch.empty_like(live.detach(), dtype=offered.dtype)
    device = live.device if isinstance(live, torch.Tensor) else "cpu"
    return torch.empty(offered.shape, dtype=offered.dtype, device=device)
