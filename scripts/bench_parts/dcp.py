"""DCP's own way to save: what a job has without this package."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

__all__ = ["DcpSaves"]


class DcpSaves:
    """Saves of one state dict, each into a folder of its own.

    Args:
        state_dict: Made once: to collect it again costs DCP no time here.
    """

    def __init__(self, state_dict: dict[str, Any]) -> None:
        self._state_dict = state_dict
        # Its thread must not share a group with the all-reduces of the training steps.
        self._group = dist.new_group(backend="gloo")

    def save(self, folder: Path) -> None:
        """Save; durable when this returns."""
        writer = FileSystemWriter(folder, sync_files=True)
        dcp.save(self._state_dict, storage_writer=writer, process_group=self._group)

    def start(self, folder: Path, kind: AsyncCheckpointerType) -> Future[Any]:
        """Save in the background; the future ends when it is durable."""
        saving = dcp.async_save(
            self._state_dict,
            storage_writer=FileSystemWriter(folder, sync_files=True),
            process_group=self._group,
            async_checkpointer_type=kind,
        )
        assert isinstance(saving, Future)
        return saving
