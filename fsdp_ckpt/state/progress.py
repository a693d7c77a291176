"""How far a run has come, in counts that mean the same on any number of ranks.

Invariant: `Progress` and its data cursor move together. A step is reported once, with what all
ranks together have consumed, so a training loop writes ``state.progress.advance(samples=...)`` and
nothing else.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, Protocol

from fsdp_ckpt.errors import MismatchError

__all__ = ["DataCursor", "Progress", "field_problems"]


class DataCursor(Protocol):
    """A position in the data that follows training."""

    def advance(self, samples: int) -> None:
        """Move on by ``samples``, counted over all ranks; refuse without having moved."""

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of ``epoch``; stay where it is if this is the current epoch."""


class Progress:
    """Counts of a run: steps, epochs, samples, tokens.

    Attributes:
        step: Optimizer steps done.
        epoch: Epochs finished, so also the index of the current one.
        samples: Samples consumed since the run began, over all ranks.
        tokens: Tokens consumed since the run began, over all ranks.
    """

    def __init__(self) -> None:
        self.step = 0
        self.epoch = 0
        self.samples = 0
        self.tokens = 0
        self._cursor: DataCursor | None = None

    def __repr__(self) -> str:
        return f"Progress({', '.join(f'{k}={v}' for k, v in self.state_dict().items())})"

    @property
    def cursor(self) -> DataCursor | None:
        """What follows it, where something does."""
        return self._cursor

    def attach(self, cursor: DataCursor) -> None:
        """Let ``cursor`` follow every later `advance` and `next_epoch`; replaces an earlier one.

        The cursor stays where it is: it has a state of its own in the checkpoint.
        """
        self._cursor = cursor

    def advance(self, *, samples: int = 0, tokens: int = 0, steps: int = 1) -> None:
        """Report work that is done; call it on every rank with the same numbers.

        Args:
            samples: Samples that all ranks together have consumed in it: the global batch.
            tokens: Tokens that all ranks together have consumed in it.
            steps: Optimizer steps in it.

        Raises:
            MismatchError: A count is negative, or the cursor refuses; nothing has changed.
            TypeError: A count is not an integer.
        """
        counts = {
            "samples": operator.index(samples),
            "tokens": operator.index(tokens),
            "steps": operator.index(steps),
        }
        negative = [f"{name} {count}" for name, count in counts.items() if count < 0]
        if negative:
            raise MismatchError(
                f"progress cannot go back by {', '.join(negative)}: report counts from 0 up, "
                "restore a checkpoint to go back"
            )
        if self._cursor is not None:
            self._cursor.advance(counts["samples"])
        self.samples += counts["samples"]
        self.tokens += counts["tokens"]
        self.step += counts["steps"]

    def next_epoch(self) -> None:
        """Begin the next epoch, at the start of its data; call it on every rank."""
        if self._cursor is not None:
            self._cursor.set_epoch(self.epoch + 1)
        self.epoch += 1

    def state_dict(self) -> dict[str, int]:
        """Return the four counts; the cursor has a state of its own."""
        return {
            "step": self.step,
            "epoch": self.epoch,
            "samples": self.samples,
            "tokens": self.tokens,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the counts of `state_dict`.

        Raises:
            MismatchError: A count is missing, unknown, not an int or negative; nothing has changed.
        """
        names = self.state_dict().keys()
        problems = field_problems(state, dict.fromkeys(names, int))
        if not problems:
            problems = [f"{n} is {state[n]}, expected 0 or more" for n in names if state[n] < 0]
        if problems:
            raise MismatchError(
                f"progress does not load: {'; '.join(problems)}: restore a checkpoint of this "
                "version, or leave progress out"
            )
        for name in names:
            setattr(self, name, state[name])


def field_problems(state: Mapping[str, Any], fields: Mapping[str, type]) -> list[str]:
    """List where ``state`` is not exactly ``fields``: missing, unknown, of another type.

    Types are compared strictly: a bool is not an int.
    """
    problems = [f"{name} is missing" for name in fields if name not in state]
    problems += [f"{name} is unknown" for name in state if name not in fields]
    problems += [
        f"{name} is of type {type(state[name]).__name__}, expected {kind.__name__}"
        for name, kind in fields.items()
        if name in state and type(state[name]) is not kind
    ]
    return problems
