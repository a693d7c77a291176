"""What a part of the training state must be able to do."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

__all__ = ["Stateful"]


@runtime_checkable
class Stateful(Protocol):
    """Anything that can say and take back its state."""

    def state_dict(self) -> Any:
        """Return the state: nested containers of tensors and plain data."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Take the state back."""
