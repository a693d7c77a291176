"""Ranks that are killed at one moment, as when a machine goes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch.distributed as dist

__all__ = ["die_together"]


def die_together(prefix: str) -> None:
    """Kill this rank when all have come here; called by every rank, and returns on none.

    Not by a barrier: a rank that is still in one when another dies ends by an error, not by the signal.

    Args:
        prefix: Of the paths of files by which ranks tell that they are here; one of its own for every call.
    """
    Path(f"{prefix}.{dist.get_rank()}").touch()
    while not all(Path(f"{prefix}.{rank}").exists() for rank in range(dist.get_world_size())):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
