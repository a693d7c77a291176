"""A checkpoint's shard files for another number of ranks, so that each rank's next read is one whole file.

    rows and layouts of M ranks -> those that FSDP2 gives N ranks -> shard files -> manifest, published last

Invariant: the resharded checkpoint restores to what the original would have restored to on N ranks: random
states of ranks that existed are kept, what differs per rank elsewhere is refused unless it is left out.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from fsdp_ckpt.commit.catalog import SkippedCheckpoint, step_folder
from fsdp_ckpt.commit.checkpoint import Checkpoint, Piece, SourceImages
from fsdp_ckpt.commit.locate import locate_checkpoint
from fsdp_ckpt.errors import MismatchError
from fsdp_ckpt.hf.checkpoint_writing import (
    OwnState,
    place_rows,
    write_checkpoint,
)
from fsdp_ckpt.manifest.schema import Manifest, TensorRow
from fsdp_ckpt.manifest.tree import Path, path_name
from fsdp_ckpt.plan.box import Box
from fsdp_ckpt.plan.targets import sharded_layout, sharded_rows
from fsdp_ckpt.storage.open import open_store

__all__ = ["ReshardReport", "reshard"]

SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardReport:
    """What a reshard did.

    Args:
        step: Training step of the checkpoint.
        source: Its folder.
        output: The new checkpoint's folder.
        attempt: Id under which it was written.
        saved_world_size: Ranks that saved.
        world_size: Ranks that it is for.
        num_tensors: Tensors written, those of single ranks not counted.
        total_bytes: Bytes of these.
        derived: Names of which ranks had different contents, and the lowest rank's was written.
        dropped: Names left out: as asked for, and the random states of ranks that are no more.
        skipped: Newer checkpoints under the root that were passed over, with the reason.
    """

    step: int
    source: str
    output: str
    attempt: str
    saved_world_size: int
    world_size: int
    num_tensors: int
    total_bytes: int
    derived: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    skipped: tuple[SkippedCheckpoint, ...] = ()


def reshard(
    checkpoint_url: str | os.PathLike[str],
    root_url: str | os.PathLike[str],
    *,
    world_size: int,
    step: int | None = None,
    drop: Iterable[str] = (),
    num_threads: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ReshardReport:
    """Write a checkpoint's content anew for ``world_size`` ranks; for one process.

    Tensors that some rank holds a part of are cut along dim 0, as FSDP2 does it; a checkpoint of which every
    rank held all is taken for one to be sharded, but for its buffers of integers. It restores into any other
    layout as well.

    Args:
        checkpoint_url: A run's root (its newest whole checkpoint is taken) or a checkpoint's folder.
        root_url: Another root, under which the checkpoint gets the same step.
        world_size: Number of ranks, and of shard files.
        step: Which checkpoint under the root.
        drop: Patterns (``fnmatch``) of names, or parts such as ``data``, to leave out.
        num_threads: Reads or writes in flight; by default as many as suit the stores.
        storage_options: Passed to the fsspec filesystem of those URLs that are not local.

    Raises:
        NotFoundError: No such checkpoint.
        CorruptCheckpointError: The checkpoint is damaged; nothing was published.
        AlreadyCommittedError: The root holds a checkpoint of this step.
        MismatchError: A part of the state is each rank's own, and the number of ranks changes.
        StorageError: A store failed.
        ValueError: A number below 1.
    """
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}, 1 or more expected")
    options = dict(storage_options or {})
    checkpoint, skipped = locate_checkpoint(open_store(checkpoint_url, **options), step)
    checkpoint.check_files()
    manifest = checkpoint.manifest
    shares = _Shares(checkpoint, world_size, tuple(drop))
    draft = shares.draft()
    store = open_store(root_url, **options).child(step_folder(manifest.step))
    written = write_checkpoint(
        store, draft, _CheckpointSource(checkpoint), shares.own, num_threads=num_threads
    )
    return ReshardReport(
        step=manifest.step,
        source=checkpoint.store.url,
        output=store.url,
        attempt=written.attempt,
        saved_world_size=manifest.world_size,
        world_size=world_size,
        num_tensors=len(written.tensors),
        total_bytes=sum(row.num_bytes for row in written.tensors),
        derived=shares.derived,
        dropped=shares.dropped,
        skipped=skipped,
    )


class _Shares:
    """Who gets what of a checkpoint.

    Args:
        checkpoint: The source.
        world_size: Number of ranks to share it out to.
        drop: Patterns of names to leave out.
    """

    def __init__(self, checkpoint: Checkpoint, world_size: int, drop: tuple[str, ...]) -> None:
        self._manifest = checkpoint.manifest
        self._world_size = world_size
        self._resized = world_size != self._manifest.world_size
        self._drop = drop
        self._refuse_parts(checkpoint.store.url)
        common = range(min(world_size, self._manifest.world_size))
        any_own = self._manifest.own_paths or self._manifest.varying
        self.own = {rank: self._own_of(checkpoint, rank) for rank in common if any_own}
        varying = self._manifest.varying if self._resized else ()
        self.derived = tuple(path_name(path) for path in varying if not self._is_dropped(path))
        self.dropped = tuple(self._dropped_names())

    def draft(self) -> Manifest:
        """Return the manifest without what belongs to an attempt."""
        manifest = self._manifest
        held = Counter(
            path
            for own in self.own.values()
            for path in (*own.tensors, *own.values)
            if path not in manifest.varying
        )
        return Manifest(
            step=manifest.step,
            attempt="",
            generation=manifest.generation,
            world_size=self._world_size,
            tensors=self._rows(),
            values={p: v for p, v in manifest.values.items() if not self._is_dropped(p)},
            rank_local=tuple(p for p, count in held.items() if count == self._world_size),
            partial=tuple(p for p, count in held.items() if count < self._world_size),
            varying=() if self._resized else tuple(self._kept(manifest.varying)),
        )

    def _rows(self) -> tuple[TensorRow, ...]:
        rows = [row for row in self._manifest.tensors if not self._is_dropped(row.path)]
        sharded = sharded_rows([(row.dtype, row.shape, row.layout) for row in rows])
        varying = () if self._resized else set(self._manifest.varying)
        placed = []
        for row, is_sharded in zip(rows, sharded, strict=True):
            layout = sharded_layout(self._world_size, is_sharded=is_sharded)
            # Where ranks differ, the rank whose content is the global one must stay it.
            placed.append(row if row.path in varying else dataclasses.replace(row, layout=layout))
        return place_rows(placed, self._world_size)

    def _own_of(self, checkpoint: Checkpoint, rank: int) -> OwnState:
        header = checkpoint.header(rank)
        tensors: dict[Path, Piece] = {}
        for name in sorted(header.own):
            piece = checkpoint.own_piece(rank, name)
            if piece is not None and self._stays_own(header.paths[name]):
                tensors[header.paths[name]] = piece
        values = {path: v for path, v in header.values.items() if self._stays_own(path)}
        return OwnState(tensors=tensors, values=values)

    def _stays_own(self, path: Path) -> bool:
        """Whether a rank keeps what was its own; on another number of ranks it keeps its random states."""
        return not self._is_dropped(path) and (not self._resized or path[0] == "rng")

    def _refuse_parts(self, url: str) -> None:
        """Refuse to share out what only the program that saved it understands."""
        manifest = self._manifest
        if not self._resized:
            return
        apart = [path for path in manifest.own_paths if path[0] != "rng"]
        # Of buffers and optimizer state that differ, the lowest rank's are taken, as in a restore.
        apart += [path for path in manifest.varying if path[0] not in ("model", "optimizer", "rng")]
        names = [path_name(path) for path in self._kept(apart)]
        if names:
            shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
            raise MismatchError(
                f"{url}: {shown}: each of {manifest.world_size} ranks has its own, which cannot be shared "
                f"out to {self._world_size} here; restore it with a reshard function in TrainState, or leave "
                f"it out by drop={[names[0].split('.')[0]]}",
                step=manifest.step,
                key=names[0],
            )

    def _dropped_names(self) -> Iterator[str]:
        manifest = self._manifest
        paths = (*(row.path for row in manifest.tensors), *manifest.values, *manifest.own_paths)
        yield from (path_name(path) for path in paths if self._is_dropped(path))
        ranks = range(self._world_size, manifest.world_size)
        if len(ranks) and any(path[0] == "rng" for path in self._kept(manifest.own_paths)):
            yield f"rng of ranks {ranks[0]} to {ranks[-1]}"

    def _kept(self, paths: Iterable[Path]) -> Iterator[Path]:
        return (path for path in paths if not self._is_dropped(path))

    def _is_dropped(self, path: Path) -> bool:
        name = path_name(path)
        return any(fnmatchcase(name, p) or name.startswith(f"{p}.") for p in self._drop)


class _CheckpointSource:
    """A checkpoint's global tensors, verified."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def pieces(self, name: str, wanted: Box) -> Sequence[Piece]:
        return self._checkpoint.pieces(self._checkpoint.rows[name], wanted)

    def read(self, pieces: Iterable[Piece], num_threads: int | None = None) -> SourceImages:
        return self._checkpoint.read(pieces, num_threads)
