"""Distributed checkpoints for FSDP and ZeRO-3 training, on ``torch.distributed.checkpoint``.

The public names are loaded on first use (PEP 562), so that the command line starts without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fsdp_ckpt.version import __version__

if TYPE_CHECKING:
    from fsdp_ckpt.commit.catalog import CheckpointInfo
    from fsdp_ckpt.commit.retention import RetentionPolicy
    from fsdp_ckpt.dcp import (
        ReshardLoadPlanner,
        ShardedStorageReader,
        ShardedStorageWriter,
        ShardSavePlanner,
    )
    from fsdp_ckpt.errors import (
        AlreadyCommittedError,
        CheckpointError,
        ClosedError,
        CorruptCheckpointError,
        IncompleteWriteError,
        MismatchError,
        NotFoundError,
        RankFailureError,
        RunStoppedError,
        StorageError,
        UnencodableStateError,
        UnsupportedFormatError,
    )
    from fsdp_ckpt.life.step_outcome import StepOutcome
    from fsdp_ckpt.manager import CheckpointManager
    from fsdp_ckpt.options import SaveOptions
    from fsdp_ckpt.ranks.process_groups import end_process_group, process_group
    from fsdp_ckpt.restoring.report import RestoreReport
    from fsdp_ckpt.saving.handle import SaveHandle
    from fsdp_ckpt.stability.save_policy import SavePolicy
    from fsdp_ckpt.stability.spike_policy import SpikePolicy
    from fsdp_ckpt.state import Progress, RankLocal, ResumableSampler, TrainState, make_loader
    from fsdp_ckpt.telemetry.options import TelemetryOptions

_HOMES = {
    "fsdp_ckpt.commit.catalog": ("CheckpointInfo",),
    "fsdp_ckpt.commit.retention": ("RetentionPolicy",),
    "fsdp_ckpt.dcp": (
        "ReshardLoadPlanner",
        "ShardSavePlanner",
        "ShardedStorageReader",
        "ShardedStorageWriter",
    ),
    "fsdp_ckpt.errors": (
        "AlreadyCommittedError",
        "CheckpointError",
        "ClosedError",
        "CorruptCheckpointError",
        "IncompleteWriteError",
        "MismatchError",
        "NotFoundError",
        "RankFailureError",
        "RunStoppedError",
        "StorageError",
        "UnencodableStateError",
        "UnsupportedFormatError",
    ),
    "fsdp_ckpt.life.step_outcome": ("StepOutcome",),
    "fsdp_ckpt.manager": ("CheckpointManager",),
    "fsdp_ckpt.options": ("SaveOptions",),
    "fsdp_ckpt.ranks.process_groups": ("end_process_group", "process_group"),
    "fsdp_ckpt.restoring.report": ("RestoreReport",),
    "fsdp_ckpt.saving.handle": ("SaveHandle",),
    "fsdp_ckpt.stability.save_policy": ("SavePolicy",),
    "fsdp_ckpt.stability.spike_policy": ("SpikePolicy",),
    "fsdp_ckpt.state": ("Progress", "RankLocal", "ResumableSampler", "TrainState", "make_loader"),
    "fsdp_ckpt.telemetry.options": ("TelemetryOptions",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AlreadyCommittedError",
    "CheckpointError",
    "CheckpointInfo",
    "CheckpointManager",
    "ClosedError",
    "CorruptCheckpointError",
    "IncompleteWriteError",
    "MismatchError",
    "NotFoundError",
    "Progress",
    "RankFailureError",
    "RankLocal",
    "ReshardLoadPlanner",
    "RestoreReport",
    "ResumableSampler",
    "RetentionPolicy",
    "RunStoppedError",
    "SaveHandle",
    "SaveOptions",
    "SavePolicy",
    "ShardSavePlanner",
    "ShardedStorageReader",
    "ShardedStorageWriter",
    "SpikePolicy",
    "StepOutcome",
    "StorageError",
    "TelemetryOptions",
    "TrainState",
    "UnencodableStateError",
    "UnsupportedFormatError",
    "__version__",
    "end_process_group",
    "make_loader",
    "process_group",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
