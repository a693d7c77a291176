"""bytecheckpoint, by the calls that its documentation shows."""

from __future__ import annotations

import bytecheckpoint

from bench_parts.peers.peer import Wait, done
from bench_parts.peers.state import PeerState

__all__ = ["ByteCheckpoint"]


class ByteCheckpoint:
    """``save`` and ``load`` for FSDP2."""

    in_background = False

    def __init__(self, state: PeerState, place: str) -> None:
        self._place = place
        self._state = {"model": state.training.model, "optimizer": state.training.optimizer}

    def start(self) -> Wait:
        """Save."""
        bytecheckpoint.save(self._place, self._state, framework="fsdp2")
        return done

    def load(self) -> None:
        """Load."""
        bytecheckpoint.load(self._place, self._state, framework="fsdp2")

    def close(self) -> None:
        """Nothing is left."""
