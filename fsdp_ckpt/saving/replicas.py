"""Replicas that must be bit-equal, compared before one of them is saved for all.

Parameters and optimizer state that several ranks hold (DDP, HSDP, TP) drift apart when data or hardware went
wrong; a checkpoint keeps one of them, and the run would go on from a state that no rank had.

    plain tensors      digests are compared at every save anyway
    replicated shards  one digest per rank and layout; per tensor only where these differ
    then               the first differing element, from blocks of the two tensors

Buffers may differ: batch statistics are each rank's own.
"""

from __future__ import annotations

import base64
import logging
import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import xxhash

from fsdp_ckpt.dcp.state_view import bytes_of
from fsdp_ckpt.errors import RankFailureError
from fsdp_ckpt.manifest.last_result import LastResult
from fsdp_ckpt.manifest.schema import TensorRow
from fsdp_ckpt.manifest.tree import path_name
from fsdp_ckpt.plan.dtypes import itemsize
from fsdp_ckpt.plan.layouts import FlatLayout, MeshLayout
from fsdp_ckpt.state.names import changes_in_step

if TYPE_CHECKING:
    from fsdp_ckpt.dcp.agreement import Agreement
    from fsdp_ckpt.dcp.save_planner import ShardSavePlanner
    from fsdp_ckpt.ranks.group import RankGroup

__all__ = ["CheckReplicas", "check_replicas"]

logger = logging.getLogger("fsdp_ckpt")

CheckReplicas: TypeAlias = Literal["off", "warn", "raise"]
Drift: TypeAlias = tuple[str, int, int]  # name, two ranks whose replicas differ

BLOCK_BYTES = 1 << 20
# A digest runs at several times the speed of a device, so this share of the bytes costs under 2 % of a save.
CHEAP_SHARE = 0.1


def check_replicas(
    planner: ShardSavePlanner,
    group: RankGroup,
    check: CheckReplicas | None,
    parameters: Collection[str],
) -> None:
    """Compare what several ranks hold of parameters and optimizer state; called by every rank.

    Args:
        planner: With the state and the ranks' agreement.
        group: The ranks.
        check: ``raise``, ``warn`` or ``off``; ``None`` warns, and looks at replicated shards only where they
            are a small part of the state.
        parameters: Names of the model's parameters; its buffers may differ.

    Raises:
        RankFailureError: Replicas differ; names tensor, ranks and first differing element.
    """
    if check == "off" or group.world_size == 1:
        return
    rows, replicated, is_cheap = _rows_to_compare(planner, planner.agreement, parameters)
    drifted = _drifted_plain(planner, rows)
    # The same rows on all ranks, so that all exchange or none.
    if replicated and (check is not None or is_cheap):
        drifted += _drifted_shards(planner, group, replicated)
    if not drifted:
        return
    name, first, other = drifted[0]
    where = _first_difference(planner, group, name, first, other)
    more = f", and {len(drifted) - 1} more tensors differ" if len(drifted) > 1 else ""
    text = f"{name}: ranks {first} and {other} hold replicas that differ, first at {where}{more}"
    if check == "raise":
        raise RankFailureError(
            f"{text}; restore the last checkpoint, or save with check_replicas='warn'",
            rank=other,
            key=name,
        )
    if group.is_coordinator:
        logger.warning(text)


@LastResult
def _rows_to_compare(
    planner: ShardSavePlanner, agreement: Agreement, parameters: Collection[str]
) -> tuple[list[TensorRow], list[TensorRow], bool]:
    """Return what must be equal, what of that is in replicated shards, and whether those are few bytes."""
    rows = [row for row in agreement.tensors if changes_in_step(row.name, parameters)]
    replicated = [
        row
        for row in rows
        if isinstance(row.layout, MeshLayout | FlatLayout)
        and row.layout.num_replicas > 1
        and not planner.is_plain(row.name)
    ]
    return rows, replicated, bool(replicated) and _is_cheap(replicated, agreement.tensors)


def _is_cheap(replicated: list[TensorRow], rows: tuple[TensorRow, ...]) -> bool:
    return _bytes_per_rank(replicated) <= CHEAP_SHARE * _bytes_per_rank(rows)


def _bytes_per_rank(rows: list[TensorRow] | tuple[TensorRow, ...]) -> float:
    return sum(
        math.prod(row.shape) * itemsize(row.dtype) * row.layout.num_replicas / len(row.layout.ranks)
        for row in rows
        if row.layout.ranks
    )


def _drifted_plain(planner: ShardSavePlanner, rows: list[TensorRow]) -> list[Drift]:
    """Return plain tensors from which a rank differs: the agreement has compared them."""
    agreement = planner.agreement
    if not agreement.varying:
        return []
    varying = {path_name(path) for path in agreement.varying}
    found = []
    for row in rows:
        if row.name in varying:
            others = [rank for rank, names in agreement.own.items() if row.name in names]
            found.append((row.name, row.layout.ranks[0] if row.layout.ranks else 0, min(others)))
    return found


def _drifted_shards(
    planner: ShardSavePlanner, group: RankGroup, rows: list[TensorRow]
) -> list[Drift]:
    """Compare replicated shards: one digest per rank and layout, then one per tensor where these differ."""
    hashers = {row.layout: xxhash.xxh3_64() for row in rows}
    digests: dict[str, str] = {}

    def look() -> list[str]:
        for row in rows:
            digests[row.name] = _digest(planner, row.name)
            hashers[row.layout].update(digests[row.name].encode())
        return [hasher.hexdigest() for hasher in hashers.values()]

    everyone = group.decide("comparing replicas", look, list)
    suspect = {
        layout
        for i, layout in enumerate(hashers)
        if not isinstance(layout, MeshLayout | FlatLayout)
        or any(
            len({everyone[r][i] for r in column}) > 1 for column in layout.replica_ranks.T.tolist()
        )
    }
    if not suspect:
        return []
    names = [row.name for row in rows if row.layout in suspect]
    by_rank = group.gather([digests[name] for name in names])
    found = []
    for i, name in enumerate(names):
        layout = next(row.layout for row in rows if row.name == name)
        if isinstance(layout, MeshLayout | FlatLayout):
            pairs = [
                (column[0], rank)
                for column in layout.replica_ranks.T.tolist()
                for rank in column[1:]
            ]
            found += [(name, a, b) for a, b in pairs if by_rank[a][i] != by_rank[b][i]][:1]
    return found


def _digest(planner: ShardSavePlanner, name: str) -> str:
    hasher = xxhash.xxh3_64()
    for _, local in planner.parts(name):
        hasher.update(bytes_of(local))
    return hasher.hexdigest()


def _first_difference(
    planner: ShardSavePlanner, group: RankGroup, name: str, first: int, other: int
) -> str:
    """Say where the two ranks' tensors first differ; called by every rank."""
    parts = planner.parts(name) if group.rank in (first, other) else []
    data = b""

    def look() -> list[Any] | None:
        nonlocal data
        data = b"".join(bytes_of(local) for _, local in parts)
        blocks = [
            xxhash.xxh3_64_hexdigest(data[i : i + BLOCK_BYTES])
            for i in range(0, len(data), BLOCK_BYTES)
        ]
        shapes = [[list(local.shape), str(local.dtype)] for _, local in parts]
        return [shapes, blocks] if parts else None

    everyone = group.decide("comparing replicas", look, list)
    (shapes_a, blocks_a), (shapes_b, blocks_b) = everyone[first], everyone[other]
    if shapes_a != shapes_b:
        return f"shape and dtype: {shapes_a[0]} and {shapes_b[0]}"
    block = next(i for i, (a, b) in enumerate(zip(blocks_a, blocks_b, strict=True)) if a != b)
    start = block * BLOCK_BYTES
    mine = base64.b64encode(data[start : start + BLOCK_BYTES]).decode() if parts else None
    raw = group.gather(mine)
    a, b = base64.b64decode(raw[first]), base64.b64decode(raw[other])
    position = start + next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
    row = next(row for row in planner.agreement.tensors if row.name == name)
    return f"element {position // itemsize(row.dtype)} of what they hold"
