"""What all ranks hold together, from what each holds.

Invariant: nothing is deduplicated unless it is equal. A plain tensor or a value that is bit-equal on all
ranks is stored once; where ranks differ, the lowest rank's is the global one and every rank that differs
keeps its own as well. A DTensor is stored by its layout; those of one name on several meshes are replicas.

    each rank    Summary: name -> (what it is, digest of its content)
    together     Agreement: global rows, and who keeps an own copy of what

Usually all summaries are equal, so ranks exchange one hash and nothing else.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from fsdp_ckpt.dcp.summary import Item, Summary
from fsdp_ckpt.errors import MismatchError
from fsdp_ckpt.manifest.schema import TensorRow
from fsdp_ckpt.manifest.tree import Path
from fsdp_ckpt.plan.balance import assign_replicas
from fsdp_ckpt.plan.box import Box
from fsdp_ckpt.plan.dtypes import itemsize
from fsdp_ckpt.plan.image import Chunk
from fsdp_ckpt.plan.layouts import (
    FlatLayout,
    Layout,
    ListedLayout,
    Mesh,
    MeshLayout,
    Placement,
)

__all__ = ["Agreement", "agree"]


# What is said about one name, each with the ranks that say it; the lowest rank's first.
Holders: TypeAlias = Sequence[tuple[Item, Sequence[int]]]


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What all ranks hold together.

    Args:
        tensors: One row per global tensor, with the replica that writes it.
        value_owners: Name of each global value → rank whose value it is.
        rank_local: Paths of which every rank has its own, by declaration.
        partial: Paths of which some ranks have their own, and the others nothing.
        own: Rank → names of which it keeps its own copy, declared or because it differs.
        varying: Paths that have a global content from which some rank differs.
    """

    tensors: tuple[TensorRow, ...]
    value_owners: Mapping[str, int]
    rank_local: tuple[Path, ...] = ()
    partial: tuple[Path, ...] = ()
    varying: tuple[Path, ...] = ()
    own: Mapping[int, frozenset[str]] = field(default_factory=dict)

    def chunks_of(self, rank: int) -> Iterator[Chunk]:
        """Yield the global chunks of which ``rank`` is the one writer among the ranks that hold them."""
        for row in self.tensors:
            if row.layout.replica_of(rank) == row.replica:
                for box in row.layout.boxes_of(row.shape, rank):
                    yield row.name, row.dtype, row.shape, box


def agree(summaries: Sequence[Summary], parts: Collection[str] = ()) -> Agreement:
    """Merge all ranks' summaries, in rank order; deterministic.

    Args:
        summaries: One per rank; the same object several times where ranks are known to be equal.
        parts: First path elements below which a rank that lacks a name must not get another's: the states
            of objects that each rank has. Elsewhere ranks complete each other, as pipeline stages do.

    Raises:
        MismatchError: Ranks contradict each other about a sharded tensor, or about what is declared
            rank-local.
    """
    world_size = len(summaries)
    ranks_of: dict[int, list[int]] = {}
    for rank, summary in enumerate(summaries):
        ranks_of.setdefault(id(summary), []).append(rank)
    everywhere = MeshLayout(Mesh.world(world_size), (Placement(),))
    if len(ranks_of) == 1:
        return _agree_on(summaries[0], world_size, everywhere)
    # Costs as much as there are different summaries, not as there are ranks.
    distinct = [(summaries[ranks[0]].items, ranks) for ranks in ranks_of.values()]
    tensors: list[TensorRow] = []
    value_owners: dict[str, int] = {}
    rank_local: list[Path] = []
    partial: list[Path] = []
    varying: list[Path] = []
    own: dict[int, set[str]] = defaultdict(set)
    for name in dict.fromkeys(name for items, _ in distinct for name in items):
        holders = [(items[name], ranks) for items, ranks in distinct if name in items]
        first, (first_rank, *_) = holders[0]
        declared = any(item.kind == "own" for item, _ in holders)
        lacking = sum(len(ranks) for _, ranks in holders) < world_size
        if declared or (lacking and first.layout is None and first.path[0] in parts):
            _check_own(name, holders, declared)
            (partial if lacking else rank_local).append(first.path)
            for rank in (rank for _, ranks in holders for rank in ranks):
                own[rank].add(name)
            continue
        if first.layout is not None:
            layout = _shared_layout(name, holders)
            if lacking or layout.max_rank >= world_size:
                _check_held(name, holders, layout)
            tensors.append(_row(first, layout))
            continue
        differing = [rank for item, ranks in holders if item != first for rank in ranks]
        for rank in differing:
            own[rank].add(name)
        if differing:
            varying.append(first.path)
        if first.kind == "value":
            value_owners[name] = first_rank
        elif differing or lacking:
            tensors.append(_row(first, ListedLayout.of([(first_rank, Box.whole(first.shape))])))
        else:
            tensors.append(_row(first, everywhere))
    return Agreement(
        tensors=_with_replicas(tensors, world_size),
        value_owners=value_owners,
        rank_local=tuple(rank_local),
        partial=tuple(partial),
        varying=tuple(varying),
        own={rank: frozenset(own[rank]) for rank in sorted(own)},
    )


def _agree_on(summary: Summary, world_size: int, everywhere: MeshLayout) -> Agreement:
    """All ranks have sent this summary."""
    items = summary.items
    tensors = [_row(i, i.layout or everywhere) for i in items.values() if i.kind == "tensor"]
    own = frozenset(name for name, item in items.items() if item.kind == "own")
    return Agreement(
        tensors=_with_replicas(tensors, world_size),
        value_owners={name: 0 for name, item in items.items() if item.kind == "value"},
        rank_local=tuple(items[name].path for name in items if name in own),
        own=dict.fromkeys(range(world_size), own) if own else {},
    )


def _row(item: Item, layout: Layout) -> TensorRow:
    return TensorRow(path=item.path, dtype=item.dtype, shape=item.shape, layout=layout)


def _with_replicas(rows: Sequence[TensorRow], world_size: int) -> tuple[TensorRow, ...]:
    tensors = [(itemsize(row.dtype), row.shape, row.layout) for row in rows]
    replicas = assign_replicas(tensors, world_size)
    return tuple(
        TensorRow(
            path=row.path, dtype=row.dtype, shape=row.shape, layout=row.layout, replica=replica
        )
        for row, replica in zip(rows, replicas, strict=True)
    )


def _check_own(name: str, holders: Holders, declared: bool) -> None:
    undeclared = [ranks[0] for item, ranks in holders if item.kind != "own"]
    if declared and undeclared:
        raise MismatchError(
            f"{name}: declared rank-local on some ranks, but not on rank {undeclared[0]}",
            rank=undeclared[0],
            key=name,
        )


def _shared_layout(name: str, holders: Holders) -> MeshLayout | FlatLayout:
    """Return the layout of a sharded tensor over all ranks that hold it.

    Submeshes that share no rank, such as the data-parallel ones of several tensor-parallel ranks, hold
    replicas, where their bits are equal; another tensor may well have the same name there.
    """
    first, (first_rank, *_) = holders[0]
    layouts = list(dict.fromkeys(item.layout for item, _ in holders if item.layout is not None))
    layout = _stack(layouts)
    for item, (rank, *_) in holders:
        same = (item.kind, item.dtype, item.shape) == (first.kind, first.dtype, first.shape)
        if not same or item.layout is None or (layout is None and item.layout != first.layout):
            raise MismatchError(
                f"{name}: rank {first_rank} holds {first.dtype} {list(first.shape)} in a layout that rank "
                f"{rank} does not share ({item.dtype} {list(item.shape)})",
                rank=rank,
                key=name,
            )
    if layout is None:
        raise AssertionError("layouts that do not stack are not all equal")
    if len(layouts) > 1:
        _check_equal(name, holders, layouts)
    return layout


def _check_held(name: str, holders: Holders, layout: MeshLayout | FlatLayout) -> None:
    present = {rank for _, ranks in holders for rank in ranks}
    if present.issuperset(layout.ranks):
        return
    # A rank without elements of a flat parameter may have no state for it either.
    shape = holders[0][0].shape
    chunks = (layout.chunks(shape, replica) for replica in range(layout.num_replicas))
    absent = {int(rank) for held in chunks for rank in held.ranks} - present
    if absent:
        raise MismatchError(
            f"{name}: rank {min(absent)} of its mesh does not hold it", rank=min(absent), key=name
        )


def _stack(layouts: Sequence[MeshLayout | FlatLayout]) -> MeshLayout | FlatLayout | None:
    """Return the layout whose replicas are those of all ``layouts``, or ``None`` where there is none."""
    first = layouts[0]
    if len(layouts) == 1:
        return first
    ranks = tuple(rank for layout in layouts for rank in layout.ranks)
    alike = all(
        layout.mesh.shape == first.mesh.shape
        and dataclasses.replace(layout, mesh=first.mesh) == first
        for layout in layouts
    )
    if not alike or len(set(ranks)) != len(ranks):
        return None
    if isinstance(first, FlatLayout):
        replicas, shards = first.mesh.shape
        mesh = Mesh((len(layouts) * replicas, shards), ranks)
        return dataclasses.replace(first, mesh=mesh)
    mesh = Mesh((len(layouts), *first.mesh.shape), ranks)
    return MeshLayout(mesh, (Placement(), *first.placements))


def _check_equal(name: str, holders: Holders, layouts: Sequence[MeshLayout | FlatLayout]) -> None:
    digest_of = {rank: item.digest for item, ranks in holders for rank in ranks}
    for ranks in zip(*(layout.ranks for layout in layouts), strict=True):
        digests = {rank: digest_of[rank] for rank in ranks if rank in digest_of}
        differing = [rank for rank in digests if digests[rank] != next(iter(digests.values()))]
        if differing:
            raise MismatchError(
                f"{name}: ranks {next(iter(digests))} and {differing[0]}, of two meshes, hold different "
                "content under this name; give what differs names of its own",
                rank=differing[0],
                key=name,
            )
