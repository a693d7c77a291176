"""State that belongs to one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["RankLocal"]


@dataclass(frozen=True, slots=True)
class RankLocal:
    """Marks a part of the state as this rank's own: every rank gets its own back.

    Without the mark, a value is stored once where it is equal on all ranks, and for each rank that differs
    where it is not; the mark says that a rank without its own is an error.

    Args:
        value: Any nesting of tensors and plain data.
    """

    value: Any
