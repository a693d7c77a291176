"""The whole training state as one nested dict, and back into the live objects.

    collect       live objects -> nested dict; shares memory, changes nothing
    plan_restore  what a checkpoint offers -> where each part goes; changes nothing
    check         what only the checkpoint's data can tell; changes nothing
    apply         parts without tensors, model, optimizer, the other parts, random states last
    refresh       what follows from it all; may gather, so only once every rank has applied its own

Random states come last, since rebuilding the rest may draw random numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fsdp_ckpt.errors import MismatchError, UnencodableStateError
from fsdp_ckpt.manifest.tree import Path, path_name
from fsdp_ckpt.state.data import ResumableSampler
from fsdp_ckpt.state.engine import live_model
from fsdp_ckpt.state.engine_progress import EngineProgress, plan_engine
from fsdp_ckpt.state.live_model import apply_model
from fsdp_ckpt.state.planning import (
    Resize,
    plan_model,
    plan_optimizer,
    plan_part,
    plan_random_states,
    saved_groups,
)
from fsdp_ckpt.state.progress import Progress
from fsdp_ckpt.state.rank_local import RankLocal
from fsdp_ckpt.state.rng import (
    capture_random_state,
    check_random_state,
    derive_random_state,
    restore_random_state,
)
from fsdp_ckpt.state.saved import RestorePlan, SavedState, subtree
from fsdp_ckpt.state.stateful import Reshard, Stateful

__all__ = ["TrainState"]


class TrainState:
    """Everything that a training run must get back to go on as if nothing had happened.

    Args:
        model: Plain, or wrapped by FSDP2, FSDP1, DDP, ``torch.compile``, activation checkpointing.
        optimizer: Over the model's parameters; ``ZeroRedundancyOptimizer`` too.
        engine: A DeepSpeed engine, in place of ``model`` and ``optimizer``.
        lr_scheduler: Anything with ``state_dict`` and ``load_state_dict``; by default the engine's.
        data: The data cursor; a :class:`ResumableSampler` follows ``progress.advance(samples=...)``.
        extra: Name → anything with ``state_dict`` and ``load_state_dict`` (EMA, GradScaler, metrics).
        reshard: Part (``data``, ``extra.NAME``) → function that shares out its per-rank states to another
            number of ranks: called on every rank with the list of the states saved, by rank, and the keywords
            ``rank`` and ``world_size``; returns this rank's state. Without it, such a part is refused.
        generators: Name → numpy, torch or python random generators of the program's own, per rank.
        progress: Step, epoch, samples, tokens; made where not given.

    Raises:
        MismatchError: The optimizer holds parameters that the model does not have.
        UnencodableStateError: A part lacks ``state_dict`` or ``load_state_dict``; an engine that is not
            understood, or DeepSpeed is not installed.
    """

    def __init__(
        self,
        *,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        engine: Any = None,
        lr_scheduler: Stateful | None = None,
        data: Stateful | None = None,
        extra: Mapping[str, Stateful] | None = None,
        reshard: Mapping[str, Reshard] | None = None,
        generators: Mapping[str, object] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._live = live_model(model, optimizer, engine)
        self.model = self._live.module if self._live else None
        self.optimizer = self._live.optimizer if self._live else None
        self.progress = progress or Progress()
        self.generators = dict(generators or {})
        self.reshard = dict(reshard or {})
        self._before: list[tuple[Stateful, Any]] = []
        self._parts: dict[tuple[str, ...], Stateful] = {}
        parts: dict[tuple[str, ...], Stateful | None]
        self._engine = None if engine is None else EngineProgress(engine)
        if engine is not None and lr_scheduler is None:
            lr_scheduler = engine.lr_scheduler
        parts = {("lr_scheduler",): lr_scheduler, ("progress",): self.progress, ("data",): data}
        parts["engine",] = self._engine
        parts.update({("extra", name): part for name, part in (extra or {}).items()})
        for prefix, part in parts.items():
            if part is None:
                continue
            if not isinstance(part, Stateful):
                raise UnencodableStateError(
                    f"{'.'.join(prefix)}: a {type(part).__name__} without state_dict() and load_state_dict()",
                    key=".".join(prefix),
                )
            self._parts[prefix] = part
        unknown = self.reshard.keys() - {".".join(prefix) for prefix in self._parts}
        if unknown:
            raise MismatchError(
                f"reshard names {', '.join(sorted(unknown))}, which the state does not have"
            )
        if isinstance(data, ResumableSampler):
            self.progress.attach(data)
        if self._live is not None and self.optimizer is not None:
            # An FSDP2 forward may have left other parameters than the optimizer's; this puts them back.
            self._live.tensors()
            self._live.live_optimizer()

    def parameter_names(self) -> frozenset[str]:
        """Return the names of the model's parameters."""
        views = {} if self._live is None else self._live.views()
        return frozenset(view.name for found in views.values() for view in found)

    def collect(self) -> dict[str, Any]:
        """Return the state as nested dicts; tensors are the live ones, everything else is a copy.

        Called by every rank. Changes nothing: no optimizer step, no random number.
        """
        state: dict[str, Any] = {}
        if self._live is not None:
            tensors = self._live.tensors()
            state["model"] = tensors.state_dict()
            state["tied"] = tensors.tied
            if (optimizer := self._live.live_optimizer()) is not None:
                state["optimizer"] = optimizer.collect()
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
        if self._live is not None:
            plan_model(self._live.tensors(), saved, plan)
            known = frozenset(name for group in saved_groups(saved) for name in group["params"])
            if (optimizer := self._live.live_optimizer(known)) is not None:
                plan_optimizer(optimizer, saved, plan)
        resized = world_size != saved.world_size
        if resized:  # a part's own differences are judged with the part
            plan.derived.extend(
                path_name(p)
                for p in saved.varying
                if p[0] in ("model", "optimizer") and p in plan.leaves
            )
        is_other = plan_engine(saved, plan, is_engine=self._engine is not None)
        for prefix, part in self._parts.items():
            if part is self._engine and is_other:
                continue
            how = Resize(resized, allowed, reshards=".".join(prefix) in self.reshard)
            plan_part(prefix, part, saved, plan, how)
        if rank < saved.world_size:
            plan_random_states(self.generators, saved, plan)
        else:
            plan.derived.append("rng")
            plan.left_out.extend(saved.under("rng"))
        return plan

    def check(self, plan: RestorePlan, leaves: Mapping[Path, Any]) -> None:
        """Raise what :meth:`apply` would raise about random states, while nothing live has changed.

        A rank for which there are none, although others have theirs, is to get a stream of its own.

        Args:
            plan: As :meth:`plan_restore` made it.
            leaves: The plan's leaves, with the values in place.

        Raises:
            MismatchError: A generator is of another kind, or its state is not readable here.
        """
        if "rng" in plan.derived:
            return
        if any(path[0] == "rng" for path in leaves):
            check_random_state(self._saved_random_state(leaves), self.generators)
        elif any(path[0] == "rng" for path in plan.leaves):
            # Other ranks have theirs in the checkpoint, this one has none: it was resharded to more ranks.
            plan.derived.append("rng")

    def _saved_random_state(self, leaves: Mapping[Path, Any]) -> dict[str, Any]:
        """Return the saved streams that are here; those here that were not saved as they are."""
        saved = subtree(leaves, "rng")
        return {
            section: {label: saved.get(section, {}).get(label, now) for label, now in here.items()}
            for section, here in capture_random_state(self.generators).items()
        }

    def apply_plain_parts(self, plan: RestorePlan, leaves: Mapping[Path, Any]) -> None:
        """Load the parts whose state holds no tensors; if one refuses, those before it are put back.

        They come before the tensors, so that what a part's own ``load_state_dict`` refuses leaves model and
        optimizer as they were.

        Args:
            plan: As :meth:`plan_restore` made it.
            leaves: The plan's leaves, with the values in place.
        """
        self._before = []
        for prefix, part, content in self._contents(plan, leaves):
            if _is_plain(leaves, prefix):
                self._before.append((part, copy.deepcopy(part.state_dict())))
                part.load_state_dict(content)

    def undo_plain_parts(self) -> None:
        """Put back what :meth:`apply_plain_parts` has loaded; for a restore that fails on another rank."""
        for part, state in reversed(self._before):
            part.load_state_dict(state)
        self._before = []

    def _contents(
        self, plan: RestorePlan, leaves: Mapping[Path, Any]
    ) -> Iterator[tuple[tuple[str, ...], Stateful, Any]]:
        """Yield (prefix, part, what it gets) of every part that gets something."""
        for prefix, part in self._parts.items():
            name = ".".join(prefix)
            if name in plan.resharded:
                yield prefix, part, plan.resharded[name]
            elif any(path[: len(prefix)] == prefix for path in leaves):
                content = subtree(leaves, *prefix)
                if isinstance(part, nn.Module):  # what was allowed to be missing stays as it is
                    content = {**part.state_dict(), **content}
                yield prefix, part, content

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
        if self._live is not None:
            apply_model(self._live, plan, leaves)
        for prefix, part, content in self._contents(plan, leaves):
            if not _is_plain(leaves, prefix):
                part.load_state_dict(content)
        if "rng" in plan.derived:
            restore_random_state(derive_random_state(seed, rank, self.generators), self.generators)
        elif any(path[0] == "rng" for path in leaves):
            restore_random_state(self._saved_random_state(leaves), self.generators)

    def refresh(self, plan: RestorePlan) -> None:
        """Bring up to date what follows from what was applied; called by every rank, after :meth:`apply`."""
        if self._live is not None:
            self._live.refresh()
        if self._engine is not None and "engine" in plan.derived:
            self._engine.follow(self.progress)


def _is_plain(leaves: Mapping[Path, Any], prefix: tuple[str, ...]) -> bool:
    """Whether a part's state comes without tensors that are still to be filled."""
    inside = (leaf for path, leaf in leaves.items() if path[: len(prefix)] == prefix)
    return not any(isinstance(leaf, torch.Tensor) for leaf in inside)
