"""Comparing live objects to the bit."""

from __future__ import annotations

import random
import struct
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_ckpt import CheckpointError


def bits(value: Any) -> Any:
    """Return plain data that is equal exactly where type, dtype, shape and every bit of ``value`` are."""
    kind = type(value).__name__
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, torch.Tensor):
        data = value.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)
        return "tensor", str(value.dtype), tuple(value.shape), data.numpy().tobytes()
    if isinstance(value, np.ndarray | np.generic):
        return kind, value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, float):
        return kind, struct.pack(">d", value)
    if isinstance(value, Mapping):
        items = [(bits(k), bits(v)) for k, v in value.items()]
        # As for ==, order counts in an OrderedDict only.
        return kind, items if isinstance(value, OrderedDict) else sorted(items, key=repr)
    if isinstance(value, list | tuple | deque):
        return kind, [bits(v) for v in value], getattr(value, "maxlen", None)
    if isinstance(value, set | frozenset):
        return kind, sorted((bits(v) for v in value), key=repr)
    return kind, repr(value)


def random_bits() -> Any:
    """Return the states of the three global generators."""
    numpy = np.random.get_state(legacy=False)
    return bits((random.getstate(), numpy, torch.default_generator.get_state()))


def live_bits(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **parts: Any
) -> dict[str, Any]:
    """Return all that a restore could change, by name: one entry per tensor, so that a difference shows.

    Args:
        model: Its buffers too, persistent or not.
        optimizer: Over the model's parameters; its state and hyperparameters.
        **parts: Anything with ``state_dict``.
    """
    found: dict[str, Any] = {"random": random_bits()}
    names = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        names[id(tensor)] = name
        found[f"model.{name}"] = bits(tensor)
    if optimizer is not None:
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                found[f"optimizer.{names[id(parameter)]}.{key}"] = bits(value)
        for i, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key not in ("params", "param_names"):
                    found[f"group{i}.{key}"] = bits(value)
    for name, part in parts.items():
        found[name] = bits(part.state_dict())
    return found


class HasBits(Protocol):
    """A life of a test's job."""

    def bits(self) -> dict[str, Any]:
        """Return all that must not change."""


@contextmanager
def refused(error: type[CheckpointError], *lives: HasBits) -> Iterator[pytest.ExceptionInfo[Any]]:
    """The body raises ``error``, in one line, and no live object of ``lives`` changes a bit."""
    before = [life.bits() for life in lives]
    with pytest.raises(error) as caught:
        yield caught
    assert isinstance(caught.value, Exception)
    assert "\n" not in str(caught.value)
    assert [life.bits() for life in lives] == before
