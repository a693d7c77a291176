"""torch_checkpointing: one file per rank and item.

Two of its ways fail here. Resharders make it gather metadata on "cuda", so they are left out, and what it
saves loads on the same ranks only. And direct I/O, its default, ends with a write of any length, which ext4
refuses.
"""

from __future__ import annotations

from typing import Any

from torch_checkpointing import CheckpointManager
from torch_checkpointing.checkpoint_process import CheckpointProcessConfig
from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from bench_parts.peers.peer import Wait, done
from bench_parts.peers.state import PeerState

__all__ = ["TorchCheckpointing"]

# How long its process may take to load torch; 30 s by default, which a busy machine needs for it.
START_S = 120


class TorchCheckpointing:
    """Its manager, synchronous or with its process."""

    def __init__(self, state: PeerState, place: str, *, in_background: bool) -> None:
        self.in_background = in_background
        self._path = f"{place}/checkpoint"
        self._state_dict: dict[str, Any] = state.training.state_dict()
        process = CheckpointProcessConfig(subprocess_init_timeout_secs=START_S)
        self._manager = CheckpointManager(
            CheckpointManager.Config(
                save=AsyncCheckpointSaverConfig(process_config=process)
                if in_background
                else SyncCheckpointSaverConfig(),
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )
        if in_background:
            self._manager.prewarm_staging(self._state_dict)

    def start(self) -> Wait:
        """Save; training goes on once its copy is complete, since the next step changes what is copied."""
        saving = self._manager.save(self._path, self._state_dict)
        if saving is None:
            return done
        with self._manager.lock():
            return saving.result

    def load(self) -> None:
        """Load in place."""
        self._manager.load(self._path, into=self._state_dict, strict=True)

    def close(self) -> None:
        """End the manager."""
        self._manager.close()
