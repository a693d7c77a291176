"""Names that no wrapper changes.

``torch.compile``, activation checkpointing, DDP and FSDP put a level of their own into the module tree.
A *name* here leaves these levels out, by walking the modules, never by matching text: a user's own
submodule may well be called ``module``.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

__all__ = ["canonical_name", "changes_in_step"]

_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def canonical_name(model: nn.Module, key: str) -> str:
    """Return the name of a ``state_dict`` key, parameter or module without the wrappers' levels.

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


def changes_in_step(name: str, parameters: Collection[str]) -> bool:
    """Whether a tensor of the training state is changed by ``optimizer.step()`` alone.

    Those are parameters and optimizer state; forward changes buffers, and user code anything else.

    Args:
        name: In the saved state, such as ``model.layer.weight``.
        parameters: Names of the model's parameters.
    """
    if name.startswith("model."):
        return name.removeprefix("model.") in parameters
    return name.startswith("optimizer.state.")
