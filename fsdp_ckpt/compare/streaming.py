"""Tensors of two sides, read beside each other in parts.

    pairs --cut--> batches of boxes --threads: read both, compare--> distances, added up per pair

Invariant: a thread holds a batch of each side, about 8 MiB, whatever the tensors' sizes. Small tensors share
a batch, so that a block of a file is not read once for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from fsdp_ckpt.commit.checkpoint import Piece, SourceImages
from fsdp_ckpt.compare.numbers import Distance, distance
from fsdp_ckpt.compare.sides import Side, Tensor
from fsdp_ckpt.hf.cast import Bits
from fsdp_ckpt.plan.box import Box, relative_slices
from fsdp_ckpt.plan.dtypes import itemsize
from fsdp_ckpt.plan.flat import flat_range_boxes

__all__ = ["Pair", "measure_pairs"]

BATCH_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Pair:
    """The same tensor on both sides, of one shape.

    Args:
        name: Its name.
        rank: Whose own it is; ``None`` for one of all ranks.
        a: On the first side.
        b: On the second one.
    """

    name: str
    rank: int | None
    a: Tensor
    b: Tensor


_Part = tuple[int, Box]  # which pair, and which part of it


def measure_pairs(
    pairs: Sequence[Pair],
    a: Side,
    b: Side,
    num_threads: int,
    watch: Callable[[int], None] = lambda num_bytes: None,
) -> list[Distance]:
    """Return how far each pair is apart.

    Args:
        pairs: What to compare.
        a: Where the first ones are read.
        b: Where the second ones are.
        num_threads: Batches in work at a time.
        watch: Called by this thread with the bytes of each batch that is done.

    Raises:
        CorruptCheckpointError: A side is damaged; names step, rank, file and tensors.
        StorageError: A store failed.
    """
    found = [Distance() for _ in pairs]

    def measure(batch: Sequence[_Part]) -> list[Distance]:
        return _measure(pairs, batch, a, b)

    with ThreadPoolExecutor(num_threads, "fsdp_ckpt-diff") as threads:
        batches = list(_batches(pairs))
        try:
            for batch, distances in zip(batches, threads.map(measure, batches), strict=True):
                for (number, _), part in zip(batch, distances, strict=True):
                    found[number] = found[number] + part
                watch(sum(_num_bytes(pairs[number], box) for number, box in batch))
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise
    return found


def _num_bytes(pair: Pair, box: Box) -> int:
    return box.num_elements * max(itemsize(pair.a.dtype), itemsize(pair.b.dtype))


def _batches(pairs: Sequence[Pair]) -> Iterator[list[_Part]]:
    batch: list[_Part] = []
    held = 0
    for number, pair in enumerate(pairs):
        for box in _cut(pair):
            size = _num_bytes(pair, box)
            if batch and held + size > BATCH_BYTES:
                yield batch
                batch, held = [], 0
            batch.append((number, box))
            held += size
    if batch:
        yield batch


def _cut(pair: Pair) -> Iterator[Box]:
    """Yield boxes of consecutive elements, each no larger than a batch; of whole rows where they fit."""
    whole = Box.whole(pair.a.shape)
    num_elements = whole.num_elements
    size = max(itemsize(pair.a.dtype), itemsize(pair.b.dtype))
    step = BATCH_BYTES // size
    if num_elements <= step:
        yield from [whole] if num_elements else []
        return
    row = num_elements // pair.a.shape[0]
    if row <= step:
        step = step // row * row
    for low in range(0, num_elements, step):
        yield from flat_range_boxes(pair.a.shape, low, min(low + step, num_elements))


def _measure(pairs: Sequence[Pair], batch: Sequence[_Part], a: Side, b: Side) -> list[Distance]:
    found_a = [pairs[number].a.find(box) for number, box in batch]
    found_b = [pairs[number].b.find(box) for number, box in batch]
    images_a = a.read((piece for found in found_a for piece in found), 1)
    images_b = b.read((piece for found in found_b for piece in found), 1)
    distances = []
    for (number, box), pieces_a, pieces_b in zip(batch, found_a, found_b, strict=True):
        pair = pairs[number]
        left = _gather(images_a, pieces_a, box, itemsize(pair.a.dtype))
        right = _gather(images_b, pieces_b, box, itemsize(pair.b.dtype))
        distances.append(distance(left, pair.a.dtype, right, pair.b.dtype))
    return distances


def _gather(images: SourceImages, pieces: Sequence[Piece], box: Box, size: int) -> Bits:
    """Return the bytes of a box, shape (elements, bytes per element), contiguous."""
    if len(pieces) == 1 and pieces[0].region == box:
        return np.ascontiguousarray(images.array(pieces[0])).reshape(-1, size)
    gathered = np.empty((*box.sizes, size), np.uint8)
    for piece in pieces:
        gathered[relative_slices(piece.region, box)] = images.array(piece)
    return gathered.reshape(-1, size)
