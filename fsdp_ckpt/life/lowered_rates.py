"""How much lower the learning rate is for the next step: what rollbacks and spikes have asked for.

Invariant: it follows from the step, the run's rollbacks, and what the checkpoint says that it was restored
from; so it is the same on all ranks and after every resume.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from fsdp_ckpt.commit.branches import BranchHistory
from fsdp_ckpt.state.lr_factor import LearningRateFactor
from fsdp_ckpt.state.train_state import TrainState

__all__ = ["LoweredRates"]


class LoweredRates:
    """The learning rate's factor of a run.

    Args:
        state: Has the optimizer, and counts the steps.
    """

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self._history = BranchHistory()
        self._lowered: list[
            tuple[int, float, int]
        ] = []  # from which step, factor, for how many steps
        self._hook: LearningRateFactor | None = None

    @property
    def factor(self) -> float:
        """What the learning rate of the next step is multiplied with; 1 but for a while after a spike."""
        step = self._state.progress.step
        factors = [f for first, f, steps in self._lowered if first <= step < first + steps]
        return self._history.lr_factor(step) * math.prod(factors)

    def lower(self, factor: float, num_steps: int) -> None:
        """Lower it for the next steps."""
        self._lowered.append((self._state.progress.step, factor, num_steps))
        self._follow()

    def go_on(self, history: BranchHistory, saved: Iterable[Any]) -> None:
        """Take over what the run's rollbacks say, and a checkpoint: what :meth:`to_json` returned."""
        self._history = history
        self._lowered = [(int(first), float(f), int(steps)) for first, f, steps in saved]
        self._follow()

    def to_json(self) -> list[list[float]]:
        """Return what a checkpoint is to say: what is still in force, rollbacks aside."""
        step = self._state.progress.step
        return [[first, f, steps] for first, f, steps in self._lowered if step < first + steps]

    def _follow(self) -> None:
        is_lowered = self._lowered or any(r.lr_steps for r in self._history.rollbacks)
        if is_lowered and self._hook is None and self._state.optimizer is not None:
            self._hook = LearningRateFactor(self._state.optimizer, lambda: self.factor)

    def close(self) -> None:
        """Let the optimizer go on by itself."""
        if self._hook is not None:
            self._hook.close()
            self._hook = None
