"""What a part of the training state must be able to do."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

__all__ = ["Reshard", "Stateful"]


class Reshard(Protocol):
    """Shares out a part's per-rank states to another number of ranks."""

    def __call__(self, states: list[Any], *, rank: int, world_size: int) -> Any:
        """Return the state of ``rank`` of ``world_size``, from the saved states in rank order."""


@runtime_checkable
class Stateful(Protocol):
    """Anything that can say and take back its state."""

    def state_dict(self) -> Any:
        """Return the state: nested containers of tensors and plain data."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Take the state back."""
