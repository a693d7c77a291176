"""What a training loop is told after a step."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_ckpt.saving.handle import SaveHandle

__all__ = ["StepOutcome"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What was done after a step; the same on all ranks.

    Args:
        saved: The save that was begun, if any.
        rolled_back: The run has gone back: state and data stand where they stood then, so that a loader's
            iterator has to be made anew.
        should_stop: The run is to end: it was told to, and its checkpoint is committed; or this was its last
            step.
        reason: Why it saved, went back or is to end; empty where nothing was done.
    """

    saved: SaveHandle | None = None
    rolled_back: bool = False
    should_stop: bool = False
    reason: str = ""

    @property
    def must_break(self) -> bool:
        """Whether the loop over the loader is to be left."""
        return self.rolled_back or self.should_stop
