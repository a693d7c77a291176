"""torch.distributed.checkpoint, by each of its own writers, as they are by default: they fsync files."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import (
    FileSystemReader,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import DTensor

from bench_parts.dcp import DcpSaves
from bench_parts.peers.peer import Wait, done
from bench_parts.peers.state import PeerState

__all__ = ["DcpFiles", "DcpFsspec", "DcpInBackground", "DcpSafetensors"]


class DcpFiles:
    """``FileSystemWriter`` and ``FileSystemReader``."""

    in_background = False

    def __init__(self, state: PeerState, place: str) -> None:
        self._place = place
        self._state_dict = state.training.state_dict()
        self._saves = DcpSaves(self._state_dict)

    def start(self) -> Wait:
        """Save."""
        self._saves.save(Path(self._place))
        return done

    def load(self) -> None:
        """Load."""
        dcp.load(self._state_dict, storage_reader=FileSystemReader(self._place))

    def close(self) -> None:
        """Nothing is left."""


class DcpInBackground(DcpFiles):
    """The same writer by ``async_save``, in a thread or in a process of its own."""

    in_background = True

    def __init__(self, state: PeerState, place: str, *, kind: AsyncCheckpointerType) -> None:
        super().__init__(state, place)
        self._kind = kind

    def start(self) -> Wait:
        """Begin to save."""
        return self._saves.start(Path(self._place), self._kind).result


class DcpFsspec(DcpFiles):
    """``FsspecWriter`` and ``FsspecReader``, on the local file system."""

    def start(self) -> Wait:
        """Save."""
        dcp.save(self._state_dict, storage_writer=FsspecWriter(self._place))
        return done

    def load(self) -> None:
        """Load."""
        dcp.load(self._state_dict, storage_reader=FsspecReader(self._place))


class DcpSafetensors:
    """``HuggingFaceStorageWriter``: the tensors as sharded safetensors. It takes no values beside them."""

    in_background = False

    def __init__(self, state: PeerState, place: str) -> None:
        self._place = place
        self._tensors = _flatten("", state.training.state_dict())

    def start(self) -> Wait:
        """Save."""
        writer = HuggingFaceStorageWriter(self._place, save_distributed=True)
        dcp.save(dict(self._tensors), storage_writer=writer)
        return done

    def load(self) -> None:
        """Load."""
        dcp.load(dict(self._tensors), storage_reader=HuggingFaceStorageReader(self._place))

    def close(self) -> None:
        """Nothing is left."""


def _flatten(name: str, value: object) -> dict[str, torch.Tensor]:
    """Return the DTensors by their names."""
    if isinstance(value, DTensor):
        return {name: value}
    found: dict[str, torch.Tensor] = {}
    if isinstance(value, dict):
        for key, inner in value.items():
            found |= _flatten(f"{name}.{key}" if name else str(key), inner)
    return found
