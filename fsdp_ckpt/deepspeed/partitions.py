"""Where ZeRO's partitions put each parameter, for all ranks' files of one checkpoint.

    stages 1 and 2   a group's parameters stand one after the other in a flat vector; each rank has a stretch
    stage 3          each parameter is cut into as many equal ranges as ranks; each rank has its ranges one
                     after the other in its flat vectors

Source: ``deepspeed/utils/zero_to_fp32.py`` of DeepSpeed 0.19, and the ``state_dict`` of its optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from fsdp_ckpt.deepspeed.contents import OptimizerFile
from fsdp_ckpt.errors import CorruptCheckpointError

__all__ = ["Segment", "cut_parameters"]


@dataclass(frozen=True, slots=True)
class Segment:
    """A range of a parameter in a flat vector.

    Args:
        low: First of the parameter's row-major elements.
        high: One past the last.
        rank: Whose vector.
        flat: Which of that rank's vectors.
        start: Where the range starts in it, in elements.
    """

    low: int
    high: int
    rank: int
    flat: int
    start: int


def cut_parameters(
    files: Sequence[OptimizerFile], shapes: Sequence[Mapping[str, tuple[int, ...]]]
) -> dict[str, tuple[Segment, ...]]:
    """Return the segments of every parameter that is trained.

    Args:
        files: By rank.
        shapes: Per group (stage 3: per flat vector) name → shape, in the order of the flat vectors.

    Raises:
        CorruptCheckpointError: The vectors have other sizes than these parameters need.
    """
    cut = _cut_into_ranges if files[0].stage == 3 else _cut_stretches
    segments: dict[str, tuple[Segment, ...]] = {}
    for name, found in cut(files, shapes):
        if name in segments:
            raise CorruptCheckpointError(f"{files[0].where}: {name} is in two groups", key=name)
        segments[name] = tuple(found)
    return segments


def _cut_stretches(
    files: Sequence[OptimizerFile], shapes: Sequence[Mapping[str, tuple[int, ...]]]
) -> Iterator[tuple[str, list[Segment]]]:
    """Stages 1 and 2."""
    for group, by_name in enumerate(shapes):
        starts = [0, *accumulate(file.flats[group].num_elements for file in files)]
        paddings = files[0].paddings[group] if files[0].paddings else (0,) * len(by_name)
        if len(paddings) != len(by_name):
            raise _other_sizes(files[0], group, len(paddings), len(by_name))
        at = 0
        for (name, shape), padding in zip(by_name.items(), paddings, strict=True):
            stop = at + math.prod(shape)
            yield (
                name,
                [
                    Segment(
                        max(at, first) - at,
                        min(stop, last) - at,
                        rank,
                        group,
                        max(at, first) - first,
                    )
                    for rank, (first, last) in enumerate(pairwise(starts))
                    if max(at, first) < min(stop, last)
                ],
            )
            at = stop + padding
        # The end is padded to twice the number of ranks, and the last rank's padding is left out.
        align = 2 * len(files)
        if -(-at // align) != -(-starts[-1] // align):
            raise _other_sizes(files[0], group, starts[-1], at)


def _cut_into_ranges(
    files: Sequence[OptimizerFile], shapes: Sequence[Mapping[str, tuple[int, ...]]]
) -> Iterator[tuple[str, list[Segment]]]:
    """Stage 3."""
    # Per rank, all its flat vectors are one: a range may end in the next of them.
    starts = [[0, *accumulate(flat.num_elements for flat in file.flats)] for file in files]
    at = 0
    for by_name in shapes:
        for name, shape in by_name.items():
            num_elements = math.prod(shape)
            length = -(-num_elements // len(files))
            yield (
                name,
                [
                    segment
                    for rank, of_rank in enumerate(starts)
                    for segment in _range_of(rank, length, num_elements, at, of_rank)
                ],
            )
            at += length
    for rank, of_rank in enumerate(starts):
        if of_rank[-1] != at:
            raise _other_sizes(files[rank], None, of_rank[-1], at)


def _range_of(
    rank: int, length: int, num_elements: int, at: int, starts: Sequence[int]
) -> Iterator[Segment]:
    low = min(rank * length, num_elements)
    high = min(low + length, num_elements)
    for flat, (first, last) in enumerate(pairwise(starts)):
        start, stop = max(at, first), min(at + high - low, last)
        if start < stop:
            yield Segment(low + start - at, low + stop - at, rank, flat, start - first)


def _other_sizes(file: OptimizerFile, group: int | None, found: Any, needed: Any) -> Exception:
    what = "flat vectors" if group is None else f"flat vector {group}"
    return CorruptCheckpointError(
        f"{file.where}: {what} of {found} elements, {needed} expected from the model's parameters; the files "
        "are of two checkpoints or another number of ranks",
        rank=file.rank,
        key=file.key,
    )
