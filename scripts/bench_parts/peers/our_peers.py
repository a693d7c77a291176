"""This package, as a training job uses it."""

from __future__ import annotations

from bench_parts.peers.peer import Wait
from bench_parts.peers.state import PeerState
from fsdp_ckpt import CheckpointManager, SaveOptions
from fsdp_ckpt.options import SaveMode

__all__ = ["Ours"]


class Ours:
    """A manager that saves in one mode; what is loaded is verified."""

    def __init__(self, state: PeerState, place: str, *, mode: SaveMode) -> None:
        self.in_background = mode != "sync"
        self._progress = state.training.state.progress
        self._manager = CheckpointManager(
            place, state.training.state, options=SaveOptions(mode=mode)
        )

    def start(self) -> Wait:
        """Save."""
        self._progress.advance(samples=1)
        return self._manager.save().wait

    def load(self) -> None:
        """Restore."""
        self._manager.restore()

    def close(self) -> None:
        """End the manager."""
        self._manager.close()
