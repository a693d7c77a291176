"""What a load reads, rank by rank, from manifest and headers alone: no data, no process group, no torch.

    target layout --boxes--> pieces --whole blocks--> ranges per file, coalesced --> requests

Invariant: it is the arithmetic of a load itself (``Checkpoint.spans``, ``coalesce_ranges``, ``cut_ranges``),
so a load of such ranks makes these requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fsdp_ckpt.commit.checkpoint import Checkpoint, Piece
from fsdp_ckpt.commit.rank_pieces import PieceFinder
from fsdp_ckpt.commit.source_images import INLINE
from fsdp_ckpt.manifest.tree import Path, path_name
from fsdp_ckpt.plan.dtypes import itemsize
from fsdp_ckpt.plan.image import BLOCK_BYTES, coalesce_ranges
from fsdp_ckpt.plan.layouts import Layout
from fsdp_ckpt.plan.targets import TargetLayout, target_layouts
from fsdp_ckpt.storage.shard_io import cut_ranges

__all__ = ["RankCost", "keeps_own", "load_costs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCost:
    """What one rank reads.

    Args:
        rank: Which one.
        state_bytes: Tensors that it fills.
        read_bytes: Of the files' data: whole blocks, and gaps that are not worth a request of their own.
        excess_bytes: Those of them that it does not want.
        header_bytes: Of the files' headers.
        num_files: Files whose data it reads.
        num_ranges: Ranges in them, coalesced.
        num_requests: What it asks the store for, headers included; the manifest is one more.
        memory_bytes: Host memory that it takes on top of the live state, while it reads.
    """

    rank: int
    state_bytes: int
    read_bytes: int
    excess_bytes: int
    header_bytes: int
    num_files: int
    num_ranges: int
    num_requests: int
    memory_bytes: int


def keeps_own(name: str) -> bool:
    """Whether ranks get a name's rank-local content back on another number of ranks: random states."""
    return name.startswith("rng.")


def load_costs(checkpoint: Checkpoint, target: TargetLayout) -> Iterator[RankCost]:
    """Yield what each rank of a job reads when it restores a checkpoint, by rank.

    Args:
        checkpoint: Open.
        target: How the job holds its state.

    Raises:
        CorruptCheckpointError: A file's header is damaged.
        MismatchError: The target's layouts are not determined.
        StorageError: The store cannot be read now.
    """
    rows = checkpoint.manifest.tensors
    layouts = target_layouts(
        [_state_of(row.path) for row in rows],
        [(row.dtype, row.shape, row.layout) for row in rows],
        checkpoint.manifest.world_size,
        target,
    )
    by_name = {row.name: layout for row, layout in zip(rows, layouts, strict=True)}
    for rank in range(target.world_size):
        yield _cost(checkpoint, by_name, rank, target.world_size)


def _state_of(path: Path) -> tuple[str, str]:
    """Return kind of state and parameter: ("optimizer", "state", parameter, "exp_avg")."""
    if path[:2] == ("optimizer", "state") and len(path) == 4:
        return f"optimizer.{path[3]}", str(path[2])
    return str(path[0]), path_name(path[1:])


def _cost(
    checkpoint: Checkpoint, layouts: Mapping[str, Layout], rank: int, world_size: int
) -> RankCost:
    finder = PieceFinder(checkpoint, rank, world_size, keeps_own)
    pieces = list(_pieces(checkpoint, finder, layouts, rank))
    spans = checkpoint.spans(pieces)
    ranges = [
        span
        for wanted in spans.values()
        for span in coalesce_ranges(wanted.ranges, checkpoint.store.gap_bytes)
    ]
    requests = list(cut_ranges(ranges, BLOCK_BYTES, checkpoint.store.read_bytes))
    headers = set(spans)
    if finder.reads_own_header:
        headers.add(rank)
    read_bytes = sum(stop - start for start, stop in ranges)
    header_bytes = sum(checkpoint.manifest.files[r].data_offset for r in headers)
    held = [(_num_bytes(piece), piece.rank == INLINE) for piece in pieces]
    return RankCost(
        rank=rank,
        state_bytes=sum(size for size, _ in held),
        read_bytes=read_bytes,
        excess_bytes=read_bytes - sum(size for size, is_inline in held if not is_inline),
        header_bytes=header_bytes,
        num_files=len(spans),
        num_ranges=len(ranges),
        num_requests=len(headers) + len(requests),
        memory_bytes=read_bytes + header_bytes,
    )


def _num_bytes(piece: Piece) -> int:
    return piece.region.num_elements * itemsize(piece.entry.dtype)


def _pieces(
    checkpoint: Checkpoint, finder: PieceFinder, layouts: Mapping[str, Layout], rank: int
) -> Iterator[Piece]:
    varying = {path_name(path) for path in checkpoint.manifest.varying}
    for row in checkpoint.manifest.tensors:
        if row.name in varying:
            # Handed over whole: a rank's own may have another shape.
            piece = finder.whole_piece(row.name)
            yield from [] if piece is None else [piece]
            continue
        for box in layouts[row.name].boxes_of(row.shape, rank):
            yield from checkpoint.pieces(row, box)
    for name in sorted(finder.own_tensors - varying):
        piece = finder.whole_piece(name)
        yield from [] if piece is None else [piece]
