"""The whole training state as one nested dict, and back into the live objects.

    collect       live objects -> nested dict; shares memory, changes nothing
    plan_restore  what a checkpoint offers -> where each part goes; changes nothing
    apply         model, optimizer, schedule, progress, data, extra, random states last

Random states come last, since rebuilding the rest may draw random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_ckpt.errors import MismatchError
from fsdp_ckpt.manifest.tree import Path, flatten, path_name
from fsdp_ckpt.state.data import ResumableSampler
from fsdp_ckpt.state.model import ModelTensors, model_tensors, parameter_names
from fsdp_ckpt.state.optimizer import (
    apply_optimizer,
    collect_optimizer,
    empty_state_tensor,
    named_parameters_of,
    split_groups,
)
from fsdp_ckpt.state.progress import Progress
from fsdp_ckpt.state.rank_local import RankLocal
from fsdp_ckpt.state.rng import capture_random_state, derive_random_state, restore_random_state
from fsdp_ckpt.state.saved import RestorePlan, SavedState, SavedTensor, subtree

__all__ = ["Stateful", "TrainState"]


@runtime_checkable
class Stateful(Protocol):
    """Anything that can say and take back its state."""

    def state_dict(self) -> Any:
        """Return the state: nested containers of tensors and plain data."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Take the state back."""


class TrainState:
    """Everything that a training run must get back to go on as if nothing had happened.

    Args:
        model: Plain, or wrapped by FSDP2, DDP, ``torch.compile``, activation checkpointing.
        optimizer: Over the model's parameters.
        lr_scheduler: Anything with ``state_dict`` and ``load_state_dict``.
        data: The data cursor; a :class:`ResumableSampler` follows ``progress.advance(samples=...)``.
        extra: Name → anything with ``state_dict`` and ``load_state_dict`` (EMA, GradScaler, metrics).
        generators: Name → numpy, torch or python random generators of the program's own, per rank.
        progress: Step, epoch, samples, tokens; made where not given.

    Raises:
        MismatchError: The optimizer holds parameters that the model does not have.
        TypeError: A part lacks ``state_dict`` or ``load_state_dict``.
    """

    def __init__(
        self,
        *,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        lr_scheduler: Stateful | None = None,
        data: Stateful | None = None,
        extra: Mapping[str, Stateful] | None = None,
        generators: Mapping[str, object] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.progress = progress or Progress()
        self.generators = dict(generators or {})
        self._parts: dict[tuple[str, ...], Stateful] = {}
        parts: dict[tuple[str, ...], Stateful | None]
        parts = {("lr_scheduler",): lr_scheduler, ("progress",): self.progress, ("data",): data}
        parts.update({("extra", name): part for name, part in (extra or {}).items()})
        for prefix, part in parts.items():
            if part is None:
                continue
            if not isinstance(part, Stateful):
                raise TypeError(f"{'.'.join(prefix)} needs state_dict() and load_state_dict()")
            self._parts[prefix] = part
        if isinstance(data, ResumableSampler):
            self.progress.attach(data)
        if optimizer is not None:
            if model is None:
                raise MismatchError("an optimizer without its model: names come from the model")
            named_parameters_of(optimizer, parameter_names(model))

    def collect(self) -> dict[str, Any]:
        """Return the state as nested dicts; tensors are the live ones, everything else is a copy.

        Called by every rank. Changes nothing: no optimizer step, no random number.
        """
        state: dict[str, Any] = {}
        if self.model is not None:
            tensors = model_tensors(self.model)
            state["model"] = tensors.state_dict()
            state["tied"] = tensors.tied
            if self.optimizer is not None:
                state["optimizer"] = collect_optimizer(self.optimizer, parameter_names(self.model))
        for (first, *rest), part in self._parts.items():
            if rest:
                state.setdefault(first, {})[rest[0]] = part.state_dict()
            else:
                state[first] = part.state_dict()
        state["rng"] = RankLocal(capture_random_state(self.generators))
        return state

    def plan_restore(
        self, saved: SavedState, *, rank: int, world_size: int, allowed: Callable[[str], bool]
    ) -> RestorePlan:
        """Decide where each part of a checkpoint goes; allocates, but changes nothing live.

        Args:
            saved: What the checkpoint offers.
            rank: This rank.
            world_size: Number of ranks today.
            allowed: Whether the caller lets a name be missing.
        """
        plan = RestorePlan()
        if self.model is not None:
            tensors = model_tensors(self.model)
            self._plan_model(tensors, saved, plan)
            if self.optimizer is not None:
                self._plan_optimizer(self.optimizer, self.model, saved, plan)
        resized = world_size != saved.world_size
        if resized:  # a part's own differences are judged with the part
            plan.derived.extend(
                path_name(p) for p in saved.varying if p[0] in ("model", "optimizer") and p in plan.leaves
            )
        for prefix, part in self._parts.items():
            _plan_part(prefix, part, saved, plan, resized=resized, allowed=allowed)
        if rank < saved.world_size:
            plan.leaves.update(dict.fromkeys(saved.under("rng")))
            if not any(saved.under("rng")):
                plan.missing.append("rng")
        else:
            plan.derived.append("rng")
            plan.left_out.extend(saved.under("rng"))
        return plan

    def _plan_model(self, live: ModelTensors, saved: SavedState, plan: RestorePlan) -> None:
        tied = {path[1:]: first for path, first in saved.values.items() if path[:1] == ("tied",)}
        first_of = {".".join(map(str, path)): first for path, first in tied.items()}
        plan.leaves.update(dict.fromkeys(saved.under("tied")))
        names_here: dict[str, list[str]] = {name: [name] for name in live.tensors}
        for name, first in live.tied.items():
            names_here[first].append(name)
        for first, names in names_here.items():
            tensor = live.tensors[first].detach()
            sources = {first_of.get(n, n) for n in names if n in first_of or ("model", n) in saved.tensors}
            if len(sources) > 1:
                plan.problems.append(
                    f"model.{first}: {' and '.join(names)} are one tensor here, "
                    f"{len(sources)} in the checkpoint"
                )
                continue
            path = ("model", next(iter(sources), first))
            if path in plan.leaves:
                plan.copies.append((tensor, plan.leaves[path]))
            else:
                plan.leaves[path] = tensor
        for name in live.detached:
            path = ("model", name)
            plan.leaves[path] = _allocate(saved.tensors[path], None) if path in saved.tensors else None

    def _plan_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        saved: SavedState,
        plan: RestorePlan,
    ) -> None:
        groups = named_parameters_of(optimizer, parameter_names(model))
        home = {
            name: (parameter, group)
            for named, group in zip(groups, optimizer.param_groups, strict=True)
            for name, parameter in named
        }
        for path in saved.under("optimizer"):
            if path[1:2] != ("state",) or len(path) == 2:
                offered = saved.tensors.get(path)
                plan.leaves[path] = None if offered is None else _allocate(offered, None)
            elif path[2] in home:
                parameter, group = home[path[2]]
                plan.leaves[path] = _optimizer_leaf(optimizer, parameter, group, path, saved)
        values = {path: value for path, value in saved.values.items() if path[0] == "optimizer"}
        saved_groups = subtree(values, "optimizer", "param_groups") or []
        plan.problems.extend(split_groups(groups, saved_groups))
        known = {name for group in saved_groups for name in group["params"]}
        plan.missing.extend(f"optimizer.{name}" for name in home if name not in known)

    def apply(self, plan: RestorePlan, leaves: Mapping[Path, Any], seed: int, rank: int) -> None:
        """Put a checkpoint's content into the live objects; the plan's tensors are filled by now.

        Args:
            plan: As :meth:`plan_restore` made it.
            leaves: The plan's leaves, with the values in place.
            seed: For the random states of a rank that did not exist at save time.
            rank: This rank.
        """
        with torch.no_grad():
            for target, source in plan.copies:
                target.copy_(source)
        if self.model is not None:
            _apply_detached(self.model, leaves)
            if self.optimizer is not None:
                saved = subtree(leaves, "optimizer") or {}
                apply_optimizer(self.optimizer, parameter_names(self.model), saved)
        for prefix, part in self._parts.items():
            if any(path[: len(prefix)] == prefix for path in leaves):
                part.load_state_dict(subtree(leaves, *prefix))
        if "rng" in plan.derived:
            restore_random_state(derive_random_state(seed, rank, self.generators), self.generators)
        elif any(path[0] == "rng" for path in leaves):
            random_state = _on_this_device(subtree(leaves, "rng"), self.generators)
            restore_random_state(random_state, self.generators)


def _optimizer_leaf(
    optimizer: torch.optim.Optimizer,
    parameter: nn.Parameter,
    group: Mapping[str, Any],
    path: Path,
    saved: SavedState,
) -> torch.Tensor | None:
    if path not in saved.tensors:
        return None
    live = optimizer.state.get(parameter, {}).get(path[3])
    offered = saved.tensors[path]
    # Memory that is there is used again: its dtype and shape are then compared like the model's.
    if isinstance(live, torch.Tensor) and len(path) == 4:
        return live.detach()
    return empty_state_tensor(
        parameter,
        group,
        str(path[3]),
        shape=offered.shape,
        dtype=offered.dtype,
        placements=offered.placements,
    )


def _plan_part(
    prefix: tuple[str, ...],
    part: Stateful,
    saved: SavedState,
    plan: RestorePlan,
    *,
    resized: bool,
    allowed: Callable[[str], bool],
) -> None:
    name = ".".join(prefix)
    paths = list(saved.under(*prefix))
    if not paths:
        plan.missing.append(name)
        return
    apart = [path for path in paths if path in saved.own or path in saved.varying]
    if resized and apart:
        if not allowed(name):
            plan.problems.append(
                f"{path_name(apart[0])}: differs per rank in the checkpoint of {saved.world_size} ranks, and "
                f"cannot be shared out to another number; allow_missing=[{name!r}] restores without it"
            )
            return
        if any(path in saved.own for path in apart):
            plan.dropped.append(name)
            plan.left_out.extend(paths)
            return
        plan.derived.append(name)
    live = flatten({"": part.state_dict()}, lambda v: isinstance(v, torch.Tensor))
    for path in paths:
        # Where ranks differ they may differ in shape: such a tensor comes as a value.
        offered = None if path in saved.varying else saved.tensors.get(path)
        here = live.get(("", *path[len(prefix) :]))
        plan.leaves[path] = None if offered is None else _allocate(offered, here)


def _allocate(offered: SavedTensor, live: Any) -> torch.Tensor:
    """Return memory for a saved tensor: sharded and placed as the live one, plain where there is none."""
    if isinstance(live, DTensor) and tuple(live.shape) == offered.shape:
        return torch.empty_like(live.detach(), dtype=offered.dtype)
    device = live.device if isinstance(live, torch.Tensor) else "cpu"
    return torch.empty(offered.shape, dtype=offered.dtype, device=device)


def _apply_detached(model: nn.Module, leaves: Mapping[Path, Any]) -> None:
    """Hand over what modules make up in their ``state_dict`` through their own ``load_state_dict``."""
    detached = {
        key: leaves["model", name]
        for name, (key, _) in model_tensors(model).detached.items()
        if ("model", name) in leaves
    }
    if detached:
        model.load_state_dict(detached, strict=False)


def _on_this_device(saved: dict[str, Any], generators: Mapping[str, object]) -> dict[str, Any]:
    """Leave out the streams of accelerators that are not here; keep the present ones of those not saved."""
    current = capture_random_state(generators)["global"]
    found = saved["global"]
    return {**saved, "global": {kind: found.get(kind, state) for kind, state in current.items()}}
