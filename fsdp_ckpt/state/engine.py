"""A DeepSpeed engine as the plain model that it trains.

    masters, moments  <── their partitions ──>  checkpoint, under the names that the plain model has
          │ refresh
          └────────>  the parameters that the forward uses

Invariant: nothing is gathered to save. A restore writes this rank's partitions, and then every rank brings
the parameters up to date, as the engine itself does after a step.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_ckpt.errors import MismatchError, UnencodableStateError
from fsdp_ckpt.state.live_model import LiveModel, PlainModel
from fsdp_ckpt.state.local_shards import LocalShards
from fsdp_ckpt.state.model import ModelTensors, model_tensors
from fsdp_ckpt.state.names import canonical_name
from fsdp_ckpt.state.optimizer import LiveOptimizer
from fsdp_ckpt.state.parameters import ParameterView, Views
from fsdp_ckpt.state.zero_shards import frozen_shards, master_partitions

__all__ = ["engine_model", "live_model"]


def live_model(
    model: nn.Module | None, optimizer: torch.optim.Optimizer | None, engine: Any
) -> LiveModel | None:
    """Return what there is of a model and its optimizer: an engine's, plain ones, or none.

    Raises:
        MismatchError: An engine beside another model, an optimizer without its model.
        UnencodableStateError: See :func:`engine_model`.
    """
    if engine is not None:
        if model is not None or optimizer is not None:
            raise MismatchError("an engine has its model and optimizer: give only the engine")
        return engine_model(engine)
    if model is not None:
        return PlainModel(model, optimizer)
    if optimizer is not None:
        raise MismatchError("an optimizer without its model: names come from the model")
    return None


def engine_model(engine: Any) -> LiveModel:
    """Return the model that a DeepSpeed engine trains; called by every rank.

    Raises:
        UnencodableStateError: DeepSpeed is not installed, ``engine`` is no engine of it, or one whose
            partitions do not lie as those of ZeRO over all ranks do.
    """
    try:
        # Not at the top: deepspeed is an extra, and takes seconds to load.
        from deepspeed import DeepSpeedEngine
    except ImportError as e:
        raise UnencodableStateError(
            f"engine: deepspeed cannot be imported ({e}); pip install 'fsdp-ckpt[deepspeed]', or give model "
            "and optimizer of another engine",
            key="engine",
        ) from e
    if not isinstance(engine, DeepSpeedEngine):
        raise _refusal(
            f"expected what deepspeed.initialize returns first, found a {type(engine).__name__}"
        )
    if engine.zero_optimization_stage() == 0 and isinstance(
        engine.optimizer, torch.optim.Optimizer
    ):
        return PlainModel(engine.module, engine.optimizer)
    problem = _problem(engine)
    if problem:
        raise _refusal(problem)
    return _ZeroModel(engine)


def _refusal(problem: str) -> UnencodableStateError:
    return UnencodableStateError(f"engine: {problem}", key="engine")


def _problem(engine: Any) -> str | None:
    """Return what of an engine is not understood here, and what to do."""
    zero = engine.optimizer
    if engine.zero_optimization_stage() == 0:
        return (
            f"stage 0 with {type(zero).__name__} keeps masters of its own; set zero_optimization.stage to 1, "
            "which divides them, or train in 32 bits"
        )
    if not isinstance(getattr(zero, "optimizer", None), torch.optim.Optimizer):
        return f"a {type(zero).__name__} without an optimizer; give deepspeed.initialize one"
    if getattr(zero, "zenflow", False) or getattr(zero, "backup_optimizer", None) is not None:
        return "ZenFlow and partial offload split the optimizer; train without them"
    if getattr(zero, "swap_optimizer", False) or getattr(zero, "params_in_nvme_and_cpu", False):
        return "offload to NVMe keeps the state in files; offload to cpu, or not at all"
    if engine.has_moe_layers:
        return "layers of experts have partitions of their own, which cannot be saved"
    group = zero.dp_process_group
    num_ranks, world_size = dist.get_world_size(group), dist.get_world_size()
    if num_ranks != world_size:
        return (
            f"partitions go over {num_ranks} of {world_size} ranks; tensor and pipeline parallelism and MiCS "
            "cannot be saved"
        )
    return None


class _ZeroModel:
    """Stages 1, 2 and 3."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    @property
    def _zero(self) -> Any:
        return self._engine.optimizer

    @property
    def module(self) -> nn.Module:
        """The model; in stage 3 its parameters are empty."""
        module: nn.Module = self._engine.module
        return module

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """What steps the masters."""
        optimizer: torch.optim.Optimizer = self._zero.optimizer
        return optimizer

    def tensors(self) -> ModelTensors:
        """Return masters where there are, and what has none as it is."""
        found = model_tensors(self.module)
        masters = {
            id(parameter): shards
            for partition in master_partitions(self._zero)
            for parameter, shards in partition.shards()
        }
        tensors = {name: self._held(t, masters) for name, t in found.tensors.items()}
        return ModelTensors(tensors, found.tied, found.detached)

    def _held(
        self, tensor: torch.Tensor | LocalShards, masters: dict[int, LocalShards]
    ) -> torch.Tensor | LocalShards:
        if id(tensor) in masters:
            return masters[id(tensor)]
        if hasattr(tensor, "ds_tensor"):
            return frozen_shards(tensor, self._zero.dp_process_group)
        return tensor

    def views(self, known: Collection[str] = ()) -> Views:
        """Return the tensors of each partition, by the partition."""
        names = self._names(known)
        views: dict[int, list[ParameterView]] = {}
        for partition in master_partitions(self._zero):
            views[id(partition.flat)] = [
                ParameterView(
                    names[id(part.parameter)],
                    part.shape,
                    part.layout,
                    partition.rank,
                    start=part.start,
                    stop=part.stop,
                )
                for part in partition.parts
            ]
        return views

    def _names(self, known: Collection[str]) -> dict[int, str]:
        names: dict[int, str] = {}
        for key, parameter in self.module.named_parameters(remove_duplicate=False):
            name = canonical_name(self.module, key)
            first = names.setdefault(id(parameter), name)
            if first not in known and name in known:
                names[id(parameter)] = name
        return names

    def live_optimizer(self, known: Collection[str] = ()) -> LiveOptimizer:
        """Return the inner optimizer, its partitions taken apart."""
        groups: list[list[torch.Tensor]] = [[] for _ in self.optimizer.param_groups]
        for partition in master_partitions(self._zero):
            groups[partition.group].append(partition.flat)
        return LiveOptimizer(self.optimizer, self.views(known), groups)

    def forget_gathered(self) -> None:
        """Nothing to do: masters are read, not what was gathered."""

    def refresh(self) -> None:
        """Bring the parameters of the forward up to date, and drop gradients of another state."""
        with torch.no_grad():
            if self._engine.zero_optimization_stage() == 3:
                _refresh_stage_3(self._zero)
            else:
                _refresh_stage_1_or_2(self._zero)
        self._zero.zero_grad()


def _refresh_stage_3(zero: Any) -> None:
    # What a forward has left gathered, or is kept so, would be used as it is.
    zero._partition_all_parameters()
    for i in range(len(zero.fp16_groups)):
        zero._reassign_or_swap_out_partitioned_parameters(i)
    if zero.persistent_parameters:
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
    zero.invalidate_secondary_tensor()


def _refresh_stage_1_or_2(zero: Any) -> None:
    zero.update_lp_params()
    # The engine's own access to moments, made on the first step, is of the tensors that were there then.
    zero._hp_optimizer_states_linked = False
    if all(zero.optimizer.state.get(p.flat) for p in master_partitions(zero)):
        zero._lazy_init_hp_params_optimizer_state()
