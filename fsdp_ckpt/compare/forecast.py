"""Will a checkpoint load on other ranks, and what will that cost: from its manifest and headers.

    manifest ──> what each rank has for itself: kept, derived, dropped, or in the way
             ──> the data cursor: goes on, or not
    headers  ──> bytes, ranges and requests per rank

Invariant: what is said to stand in the way is what a restore of ``TrainState`` refuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fsdp_ckpt.commit.checkpoint import Checkpoint
from fsdp_ckpt.commit.load_cost import RankCost, keeps_own, load_costs
from fsdp_ckpt.hf.source import check_headers
from fsdp_ckpt.manifest.schema import Manifest
from fsdp_ckpt.manifest.tree import Path, path_name
from fsdp_ckpt.plan.targets import TargetLayout

__all__ = ["Forecast", "forecast"]

# Of these a restore takes the lowest rank's where ranks differ.
_SHARED = ("model", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a load will do.

    Args:
        url: The checkpoint's folder.
        step: Its training step.
        saved_world_size: Ranks that saved.
        world_size: Ranks that load.
        layout: Theirs.
        data_cursor: What becomes of the position in the data, in a line.
        random_states: What becomes of them, in a line.
        derived: Names of which ranks have different contents, and the lowest rank's is taken.
        problems: What makes a restore impossible, a line each.
        ranks: What each rank reads.
    """

    url: str
    step: int
    saved_world_size: int
    world_size: int
    layout: str
    data_cursor: str
    random_states: str
    derived: tuple[str, ...]
    problems: tuple[str, ...]
    ranks: tuple[RankCost, ...]

    @property
    def read_bytes(self) -> int:
        """What all ranks read of the files' data."""
        return sum(cost.read_bytes for cost in self.ranks)

    @property
    def imbalance(self) -> float:
        """What the rank that reads the most reads, over the mean; 1 where all read alike."""
        most = max(cost.read_bytes for cost in self.ranks)
        return most * len(self.ranks) / self.read_bytes if self.read_bytes else 1.0


def forecast(checkpoint: Checkpoint, target: TargetLayout) -> Forecast:
    """Say what a restore on the target's ranks will do.

    Args:
        checkpoint: Open.
        target: How the job holds its state.

    Raises:
        CorruptCheckpointError: A file is missing, has another size, or its header is damaged.
        MismatchError: The target's layouts are not determined.
        StorageError: The store cannot be read now.
    """
    checkpoint.check_files()
    manifest = checkpoint.manifest
    check_headers(checkpoint, range(manifest.world_size), 2 * checkpoint.store.concurrency)
    is_resized = target.world_size != manifest.world_size
    apart = list(_apart(manifest)) if is_resized else []
    problems = [
        f"{name}: each of {manifest.world_size} ranks has its own; give TrainState a reshard function for "
        f"{part!r}, or restore without it by allow_missing=[{part!r}]"
        for part, name in apart
    ]
    cursor, is_inside = _data_cursor(manifest, {part for part, _ in apart})
    if not is_inside:
        problems.append(f"data: {cursor}")
    return Forecast(
        url=checkpoint.store.url,
        step=manifest.step,
        saved_world_size=manifest.world_size,
        world_size=target.world_size,
        layout=str(target),
        data_cursor=cursor,
        random_states=_random_states(manifest, target.world_size),
        derived=tuple(
            path_name(path) for path in manifest.varying if is_resized and path[0] in _SHARED
        ),
        problems=tuple(problems),
        ranks=tuple(load_costs(checkpoint, target)),
    )


def _apart(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield (part, name) of what cannot be shared out to other ranks, the first name of each part."""
    seen = set()
    own = [path for path in manifest.own_paths if not keeps_own(path_name(path))]
    varying = [path for path in manifest.varying if path[0] not in (*_SHARED, "rng")]
    for path in (*own, *varying):
        part = _part_of(path)
        if part not in seen:
            seen.add(part)
            yield part, path_name(path)


def _part_of(path: Path) -> str:
    """Return the part of a ``TrainState`` that a path belongs to: ``data``, ``extra.ema``."""
    return path_name(path[:2] if path[0] == "extra" else path[:1])


def _data_cursor(manifest: Manifest, apart: set[str]) -> tuple[str, bool]:
    """Return a line, and whether the position can be right."""
    if "data" in apart:
        return "each rank has its own position", True  # named among the problems
    values = {path[1]: v for path, v in manifest.values.items() if path[0] == "data" and path[1:]}
    has_any = values or any(
        path[0] == "data" for path in (*manifest.own_paths, *(row.path for row in manifest.tensors))
    )
    if not has_any:
        return "none was saved", True
    epoch, cursor, total = (values.get(name) for name in ("epoch", "cursor", "num_samples"))
    if not (type(epoch) is type(cursor) is type(total) is int):
        return "goes on as its own load_state_dict has it", True
    if not 0 <= cursor <= total:
        return f"cursor is {cursor}, outside of the {total} samples of an epoch", False
    return f"goes on at sample {cursor} of {total} in epoch {epoch}", True


def _random_states(manifest: Manifest, world_size: int) -> str:
    saved = manifest.world_size
    if not any(path[0] == "rng" for path in (*manifest.own_paths, *manifest.varying)):
        return "none were saved for each rank"
    kept = _ranks(0, min(saved, world_size))
    if world_size > saved:
        return f"kept on {kept}, derived on {_ranks(saved, world_size)}"
    return f"kept on {kept}" + (
        f", those of {_ranks(world_size, saved)} dropped" if world_size < saved else ""
    )


def _ranks(first: int, stop: int) -> str:
    return f"rank {first}" if stop == first + 1 else f"ranks {first} to {stop - 1}"
