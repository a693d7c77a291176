"""What a user may choose, as frozen dataclasses that are checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

__all__ = ["OnBusy", "SaveMode", "SaveOptions", "WriterKind"]

SaveMode: TypeAlias = Literal["async", "lazy", "sync"]
WriterKind: TypeAlias = Literal["process", "thread"]
OnBusy: TypeAlias = Literal["wait", "skip", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """How a save goes.

    Args:
        mode: ``async`` returns when the snapshot is taken, and persists it in the background. ``lazy``
            returns at once: parameters and optimizer state are copied beside the next forward and backward
            pass, and ``optimizer.step()`` waits for the rest; everything else is copied before it returns.
            ``sync`` returns when the checkpoint is committed.
        writer: Who persists: ``process``, one torch-free process per rank at low priority, which finishes
            what it has if the trainer dies; or ``thread``. A synchronous save is written by threads, as is
            one into a store that no other process can open (``memory://``, a store object).
        max_in_flight: Images per rank, each as large as the rank's shard; a save in the background holds one
            until its bytes are durable.
        on_busy: What ``save`` does while every image is in use, on any rank: ``wait`` for one, ``skip`` this
            save on all ranks, or raise an ``error`` on all.
    """

    mode: SaveMode = "async"
    writer: WriterKind = "process"
    max_in_flight: int = 1
    on_busy: OnBusy = "wait"

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("mode", self.mode, get_args(SaveMode)),
            ("writer", self.writer, get_args(WriterKind)),
            ("on_busy", self.on_busy, get_args(OnBusy)),
        ):
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")
        if not isinstance(self.max_in_flight, int) or self.max_in_flight < 1:
            raise ValueError(f"max_in_flight must be at least 1, not {self.max_in_flight!r}")
