"""What the bench asks of everything that saves a state and loads it.

Invariant: each method is called by every rank, in the same order. A save has ended when the peer says so;
whether it is durable then is another question, see ``fsyncs``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

__all__ = ["Peer", "Wait", "done"]

Wait = Callable[[], object]


class Peer(Protocol):
    """One way to save the state into a place, and to load it from there.

    Its constructor takes the state and the place, a folder or a URL. Before each save the place is empty.

    Args:
        in_background: Whether training goes on before a save has ended.
    """

    in_background: bool

    def start(self) -> Wait:
        """Save, in the background as far as training need not wait; what it returns waits for the end."""

    def load(self) -> None:
        """Load into the live tensors."""

    def close(self) -> None:
        """End its threads and processes."""


def done() -> None:
    """Wait for a save that has ended already."""
