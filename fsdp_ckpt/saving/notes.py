"""What goes into a checkpoint beside the training state: what the run knew of itself.

Invariant: it is the coordinator's alone, so ranks need not agree on it, and a save exchanges nothing for it.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future
from typing import Any, Protocol

from fsdp_ckpt.commit.catalog import CheckpointInfo
from fsdp_ckpt.commit.receipt import Attempt
from fsdp_ckpt.dcp.contents import Contents
from fsdp_ckpt.dcp.live import CODEC
from fsdp_ckpt.manifest.tree import flatten, path_name
from fsdp_ckpt.state.saved import RUN_SECTION

__all__ = ["SaveNotes", "with_facts"]


class SaveNotes(Protocol):
    """What the coordinator has to do with one save."""

    def facts(self) -> dict[str, Any]:
        """Return what the run knows of itself: nested plain data."""

    def follow(self, attempt: Attempt, committed: Future[CheckpointInfo]) -> None:
        """Take note of the save, which is under way."""


def with_facts(contents: Contents, notes: SaveNotes | None) -> Contents:
    """Return what a rank writes, with what its notes say."""
    if notes is None:
        return contents
    leaves = flatten({RUN_SECTION: notes.facts()}, lambda _: False)
    values = {path: CODEC.encode(value, path_name(path)) for path, value in leaves.items()}
    return dataclasses.replace(contents, global_values={**contents.global_values, **values})
