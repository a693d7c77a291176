"""Which checkpoints a run's root holds.

    ROOT/step-000000500/manifest.json      a checkpoint
    ROOT/step-000000510/<attempt>/...      no manifest: a torn attempt, or a save under way

Discovery and retention ask the same functions, so they agree on what a checkpoint is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from fsdp_ckpt.commit.checkpoint import Checkpoint
from fsdp_ckpt.errors import (
    CorruptCheckpointError,
    NotFoundError,
    UnsupportedFormatError,
)
from fsdp_ckpt.manifest.schema import Manifest
from fsdp_ckpt.storage.store import Store

__all__ = ["CheckpointInfo", "SkippedCheckpoint", "find_checkpoints", "list_steps", "step_folder"]

_STEP_FOLDER = re.compile(r"step-(\d{9,18})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """A committed, whole checkpoint.

    Args:
        step: Training step.
        attempt: Id of the save that wrote it.
        generation: Number of rollbacks before it.
        world_size: Ranks that wrote it.
        num_bytes: Bytes of all shard files.
        created: ISO 8601, UTC.
        url: Its folder.
    """

    step: int
    attempt: str
    generation: int
    world_size: int
    num_bytes: int
    created: str
    url: str

    @classmethod
    def of(cls, manifest: Manifest, url: str) -> CheckpointInfo:
        """Describe a manifest found at ``url``."""
        return cls(
            step=manifest.step,
            attempt=manifest.attempt,
            generation=manifest.generation,
            world_size=manifest.world_size,
            num_bytes=sum(file.num_bytes for file in manifest.files),
            created=manifest.created,
            url=url,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedCheckpoint:
    """A step that was passed over.

    Args:
        step: Training step.
        reason: One line.
        torn: Whether it was never committed, rather than damaged later.
        attempt: Id of the save, where its manifest could be read.
        newer: Whether it is of a format version that this package is too old for.
    """

    step: int
    reason: str
    torn: bool = False
    attempt: str | None = None
    newer: bool = False


def step_folder(step: int) -> str:
    """Return the folder of a step's checkpoint, relative to the root."""
    return f"step-{step:09d}"


def list_steps(root: Store) -> list[int]:
    """Return the steps that have a folder, newest first, committed or not; foreign folders are ignored.

    Raises:
        StorageError: The root cannot be read. An absent root is an empty one.
    """
    found = [_STEP_FOLDER.fullmatch(name) for name in root.list_folders()]
    # ``step-0000000007`` is not how we write step 7: foreign.
    steps = [int(match[1]) for match in found if match and match[0] == step_folder(int(match[1]))]
    return sorted(steps, reverse=True)


def find_checkpoints(root: Store) -> Iterator[CheckpointInfo | SkippedCheckpoint]:
    """Look at every step, newest first, as far as the caller goes on.

    Raises:
        StorageError: The root, or a manifest in it, cannot be read now; never taken for damage.
    """
    for step in list_steps(root):
        store = root.child(step_folder(step))
        attempt = None
        try:
            checkpoint = Checkpoint.open(store)
            manifest = checkpoint.manifest
            attempt = manifest.attempt
            if manifest.step != step:
                raise CorruptCheckpointError(
                    f"{store.url}: the manifest is of step {manifest.step}"
                )
            checkpoint.check_files()
        except NotFoundError:
            reason = "no manifest: a save that died before its commit, or one still under way"
            yield SkippedCheckpoint(step=step, reason=reason, torn=True)
        except CorruptCheckpointError as e:
            yield SkippedCheckpoint(step=step, reason=str(e), attempt=attempt)
        except UnsupportedFormatError as e:
            yield SkippedCheckpoint(step=step, reason=str(e), newer=True)
        else:
            yield CheckpointInfo.of(manifest, store.url)
