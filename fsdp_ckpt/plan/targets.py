"""Which layouts a state has on other ranks: as it was saved, or by a rule that is named.

    saved    the saved layout on another number of ranks: the first axis of its mesh grows or shrinks
    fsdp     dim 0 over all ranks, as FSDP2 cuts it
    hsdp     dim 0 over the ranks of a group, the groups alike
    flat     units of flattened parameters, as FSDP1 cuts them
    ddp      every rank holds all

Invariant: a layout tells the boxes that a training job of that kind would hold, so what a load of them reads
is known without one. What is cut at all is known from the saved layouts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from fsdp_ckpt.errors import MismatchError
from fsdp_ckpt.plan.dtypes import FLOATING
from fsdp_ckpt.plan.layouts import FlatLayout, Layout, ListedLayout, Mesh, MeshLayout, Placement

__all__ = [
    "Held",
    "Kind",
    "TargetLayout",
    "is_cut",
    "sharded_layout",
    "sharded_rows",
    "target_layouts",
]

Kind: TypeAlias = Literal["saved", "fsdp", "hsdp", "flat", "ddp"]
Held: TypeAlias = tuple[str, tuple[int, ...], Layout]  # dtype, global shape, layout as saved
_WAY_OUT = "name the layout of the job: fsdp, hsdp:RxS, flat or ddp"
# Blocks of a model are numbered: "layers.3." of "layers.3.attention.weight".
_BLOCK = re.compile(r"(?:^|.*?\.)\d+\.", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetLayout:
    """How a job holds its state.

    Args:
        kind: The rule.
        world_size: Number of ranks.
        num_groups: Of ``hsdp``: groups of ranks that hold the same.
    """

    kind: Kind = "saved"
    world_size: int
    num_groups: int = 1

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind must be one of {', '.join(get_args(Kind))}, not {self.kind!r}")
        if self.world_size < 1 or self.num_groups < 1 or self.world_size % self.num_groups:
            raise ValueError(f"{self.world_size} ranks in {self.num_groups} groups")

    def __str__(self) -> str:
        if self.kind != "hsdp":
            return self.kind
        return f"hsdp:{self.num_groups}x{self.world_size // self.num_groups}"


def is_cut(layout: Layout) -> bool:
    """Whether a layout gives each rank a part."""
    if isinstance(layout, MeshLayout):
        return any(placement.dim is not None for placement in layout.placements)
    return isinstance(layout, FlatLayout) or len(layout.listed) > 1


def sharded_rows(tensors: Sequence[Held]) -> list[bool]:
    """Return, for each tensor, whether a job that shards would cut it.

    Those that some rank held a part of; where there are none, all but 0-d ones and those that are not
    floating-point: counts and masks among the buffers.
    """
    any_cut = any(is_cut(layout) for _, _, layout in tensors)
    return [
        bool(shape) and (is_cut(layout) if any_cut else dtype in FLOATING)
        for dtype, shape, layout in tensors
    ]


def sharded_layout(world_size: int, *, is_sharded: bool) -> MeshLayout:
    """Return what FSDP2 does on ``world_size`` ranks: dim 0 is cut, or every rank holds all."""
    return MeshLayout(Mesh.world(world_size), (Placement(0 if is_sharded else None),))


def target_layouts(
    names: Sequence[tuple[str, str]],
    tensors: Sequence[Held],
    saved_ranks: int,
    target: TargetLayout,
) -> list[Layout]:
    """Return the layout of each tensor on the target's ranks.

    Args:
        names: (kind of state, parameter) per tensor, such as ``("exp_avg", "layers.0.weight")``: those of one
            kind and block make up a flat unit.
        tensors: As saved.
        saved_ranks: Number of ranks that saved.
        target: Where to.

    Raises:
        MismatchError: A saved layout does not say what it is on so many ranks.
    """
    world_size, groups = target.world_size, target.num_groups
    if target.kind == "saved":
        return _scaled(names, tensors, saved_ranks, world_size)
    sharded = sharded_rows(tensors)
    if target.kind == "flat":
        return _flat_units(names, tensors, sharded, world_size)
    if target.kind == "hsdp":
        mesh = Mesh.whole((groups, world_size // groups))
        cut = MeshLayout(mesh, (Placement(), Placement(0)))
        whole = MeshLayout(mesh, (Placement(), Placement()))
        return [cut if is_sharded else whole for is_sharded in sharded]
    every = target.kind == "ddp"
    return [sharded_layout(world_size, is_sharded=s and not every) for s in sharded]


def _scaled(
    names: Sequence[tuple[str, str]], tensors: Sequence[Held], saved_ranks: int, world_size: int
) -> list[Layout]:
    if world_size == saved_ranks:
        return [layout for _, _, layout in tensors]
    stops: dict[tuple[Mesh, int], int] = {}  # of the flat groups, in elements
    for _, shape, layout in tensors:
        if isinstance(layout, FlatLayout):
            group = layout.mesh, layout.shard_elements
            stops[group] = max(stops.get(group, 0), layout.start + math.prod(shape))
    known: dict[Layout, Layout | None] = {}
    found = []
    for (_, name), (_, _, layout) in zip(names, tensors, strict=True):
        if layout not in known:
            known[layout] = _scale(layout, stops, saved_ranks, world_size)
        scaled = known[layout]
        if scaled is None:
            raise MismatchError(
                f"{name}: how {saved_ranks} ranks held it does not say how {world_size} would; {_WAY_OUT}",
                key=name,
            )
        found.append(scaled)
    return found


def _scale(
    layout: Layout, stops: dict[tuple[Mesh, int], int], saved_ranks: int, world_size: int
) -> Layout | None:
    """Return a layout on another number of ranks; ``None`` where that is not determined."""
    if world_size == 1:
        return sharded_layout(1, is_sharded=False)
    if isinstance(layout, ListedLayout):
        # One process held all.
        return sharded_layout(world_size, is_sharded=False) if saved_ranks == 1 else None
    shape = layout.mesh.shape
    if len(layout.mesh.ranks) != saved_ranks:  # a pipeline's stage, or the like
        return None
    if isinstance(layout, FlatLayout):
        mesh_shape = (1, world_size) if shape[0] == 1 else _grown(shape, world_size)
        if mesh_shape is None:
            return None
        elements = -(-stops[layout.mesh, layout.shard_elements] // mesh_shape[1])
        return FlatLayout(Mesh.whole(mesh_shape), max(elements, 1), layout.start)
    if not is_cut(layout):
        return sharded_layout(world_size, is_sharded=False)
    grown = _grown(shape, world_size)
    return None if grown is None else MeshLayout(Mesh.whole(grown), layout.placements)


def _grown(shape: tuple[int, ...], world_size: int) -> tuple[int, ...] | None:
    """Return the mesh with another first axis: what is data-parallel stands there."""
    inner = math.prod(shape[1:])
    return None if world_size % inner else (world_size // inner, *shape[1:])


def _flat_units(
    names: Sequence[tuple[str, str]],
    tensors: Sequence[Held],
    sharded: Sequence[bool],
    world_size: int,
) -> list[Layout]:
    """Flatten each numbered block, and all that is in none; a unit has one dtype."""
    units: dict[tuple[str, str, str], list[int]] = {}
    for i, ((kind, name), (dtype, _, _)) in enumerate(zip(names, tensors, strict=True)):
        if sharded[i]:
            match = _BLOCK.match(name)
            units.setdefault((kind, match[0] if match else "", dtype), []).append(i)
    mesh = Mesh.whole((1, world_size))
    found: list[Layout] = [sharded_layout(world_size, is_sharded=False)] * len(tensors)
    for members in units.values():
        sizes = [math.prod(tensors[i][1]) for i in members]
        elements = max(-(-sum(sizes) // world_size), 1)
        start = 0
        for i, size in zip(members, sizes, strict=True):
            found[i] = FlatLayout(mesh, elements, start)
            start += size
    return found
