"""What a restore may pass over, and what it did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fsdp_ckpt.commit.catalog import SkippedCheckpoint

__all__ = ["Allowed", "RestoreReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """What a restore did, the same on all ranks but for what is a rank's own.

    Args:
        step: Restored step, or ``None`` where the run starts fresh.
        attempt: Id of the save it came from.
        saved_world_size: Ranks that saved.
        preserved: Parts of the state that are back to the bit.
        derived: Names taken from another rank's content, or made up deterministically, as for the random
            states of ranks that did not exist.
        dropped: Names left out.
        missing: Live names that the checkpoint lacks; they keep their live values.
        unexpected: Saved names that the live state lacks.
        cast: Name → (saved dtype, live dtype).
        skipped: Newer checkpoints that were passed over, with the reason.
        run: What the run knew of itself when it saved, besides its state: how long it had been training, what
            its losses had been like; where policies watched it.
        num_bytes_from_memory: What this rank had still in host memory, and did not read.
    """

    step: int | None
    attempt: str | None = None
    saved_world_size: int | None = None
    preserved: tuple[str, ...] = ()
    derived: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    cast: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    skipped: tuple[SkippedCheckpoint, ...] = ()
    run: Mapping[str, Any] = field(default_factory=dict)
    num_bytes_from_memory: int = 0

    @property
    def is_fresh(self) -> bool:
        """Whether there was nothing to restore."""
        return self.step is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """Which differences between checkpoint and live state a restore may pass over.

    Args:
        missing: Patterns (``fnmatch``) of live names that the checkpoint may lack.
        unexpected: Patterns of saved names that the live state may lack.
        cast: Load tensors into another dtype.
        torn: Start fresh although saves were begun under this root and none was committed.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    cast: bool
    torn: bool
