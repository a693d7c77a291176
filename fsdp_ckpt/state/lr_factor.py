"""A learning rate that is lower for a while, without the schedule knowing.

    scheduler sets lr ──> [lr · factor while optimizer.step() runs] ──> lr as it was

Invariant: outside ``optimizer.step()`` every group has the learning rate that the schedule gave it. So
schedules that go by the current value survive it, checkpoints never hold a lowered one, and it ends exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["LearningRateFactor"]


class LearningRateFactor:
    """Multiplies the learning rates of an optimizer while it makes a step.

    Args:
        optimizer: Whose steps.
        factor: Asked before each step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, factor: Callable[[], float]) -> None:
        self._factor = factor
        self._kept: list[tuple[dict[str, Any], Any]] = []
        self._hooks = [
            optimizer.register_step_pre_hook(self._lower),
            optimizer.register_step_post_hook(self._put_back),
        ]

    def _lower(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._put_back()  # a step that raised has not
        factor = self._factor()
        if factor == 1:
            return
        for group in optimizer.param_groups:
            lr = group["lr"]
            if isinstance(lr, torch.Tensor):  # captured graphs know it by its memory
                self._kept.append((group, lr.clone()))
                lr.mul_(factor)
            else:
                self._kept.append((group, lr))
                group["lr"] = lr * factor

    def _put_back(self, *_: Any) -> None:
        for group, lr in self._kept:
            if isinstance(lr, torch.Tensor):
                group["lr"].copy_(lr)
            else:
                group["lr"] = lr
        self._kept = []

    def close(self) -> None:
        """Let the optimizer go on without it."""
        self._put_back()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
