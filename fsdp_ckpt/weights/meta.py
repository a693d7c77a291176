"""Memory for tensors on the meta device, which goes live only when it is filled.

Invariant: a model is as it was until :meth:`FreshMemory.install`; tied tensors are one tensor afterwards too.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_ckpt.state.model import ModelTensors
from fsdp_ckpt.state.names import canonical_name

__all__ = ["FreshMemory"]


class FreshMemory:
    """Uninitialised memory for every meta tensor of a model.

    Args:
        model: The model; FSDP2's sharded parameters are made as sharded.
        device: Where; by default the device of the model's mesh, or torch's default device.
    """

    def __init__(self, model: nn.Module, device: torch.device | str | None = None) -> None:
        self._model = model
        places = list(_meta_places(model))
        if device is None:
            meshes = (t.device_mesh for *_, t in places if isinstance(t, DTensor))
            mesh = next(meshes, None)
            device = torch.get_default_device() if mesh is None else mesh.device_type
        self._by_id = {
            id(tensor): torch.empty_like(tensor.detach(), device=device) for *_, tensor in places
        }
        self.unsaved = [
            canonical_name(model, f"{path}.{key}" if path else key)
            for path, module, key, _ in places
            if key in module._non_persistent_buffers_set
        ]
        """Names of non-persistent buffers among them, which no file holds."""

    def stand_in(self, live: ModelTensors) -> ModelTensors:
        """Return the model's tensors, with the memory in place of those that have none."""
        tensors = {name: self._by_id.get(id(t), t) for name, t in live.tensors.items()}
        return ModelTensors(tensors, live.tied, live.detached)

    def install(self) -> None:
        """Make the memory the model's."""
        if not self._by_id:
            return
        tied = [
            (module, key, id(parameter))
            for module in self._model.modules()
            for key, parameter in module._parameters.items()
            if id(parameter) in self._by_id
        ]
        # As Module.to_empty does it, so that FSDP2 takes the new shards over.
        self._model._apply(lambda tensor: self._by_id.get(id(tensor), tensor))  # type: ignore[no-untyped-call]  # torch lacks types
        first: dict[int, nn.Parameter | None] = {}
        for module, key, old in tied:
            # _apply makes a parameter of its own for each module.
            module._parameters[key] = first.setdefault(old, module._parameters[key])


def _meta_places(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """Yield (module's path, module, key, tensor) of every meta parameter and buffer."""
    for path, module in model.named_modules():
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and tensor.is_meta:
                yield path, module, key, tensor
