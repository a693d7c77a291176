"""Proof that chunks cover a tensor: every element exactly once."""

from __future__ import annotations

import math

import numpy as np

from fsdp_ckpt.errors import CorruptCheckpointError
from fsdp_ckpt.plan.layouts import Chunks, FlatLayout, Layout, MeshLayout

__all__ = ["MAX_DIMS", "check_coverage"]

# numpy before 2 has 32 dims, and the bytes of an element are one of them.
MAX_DIMS = 31
PRIME = 2**31 - 1
ROUNDS = 3


def check_coverage(name: str, shape: tuple[int, ...], layout: Layout, replica: int) -> None:
    """Prove that the layout's chunks cover the tensor.

    Mesh and flat layouts cover by construction (each cut partitions what it cuts), given dims to cut and
    shards enough; listed chunks are proven.

    Raises:
        CorruptCheckpointError: An element is missing, held twice, or outside the tensor.
        UnencodableStateError: A strided shard that matches no axes of its mesh.

    Source: disjoint boxes inside the tensor cover it if and only if their volumes add up to its own.
    """
    if len(shape) > MAX_DIMS:
        raise CorruptCheckpointError(
            f"{name}: a tensor of {len(shape)} dims, at most {MAX_DIMS} expected", key=name
        )
    if not 0 <= replica < layout.num_replicas:
        raise CorruptCheckpointError(
            f"{name}: replica {replica} of {layout.num_replicas}", key=name
        )
    if isinstance(layout, MeshLayout):
        if layout.min_ndim > len(shape):
            raise CorruptCheckpointError(
                f"{name}: a placement on dim {layout.min_ndim - 1} of {len(shape)} dims", key=name
            )
        return
    if isinstance(layout, FlatLayout):
        stop, held = layout.start + math.prod(shape), layout.mesh.shape[1] * layout.shard_elements
        if stop > held:
            raise CorruptCheckpointError(
                f"{name}: elements {layout.start} to {stop} of a flat group of {held}", key=name
            )
        return
    _check_listed(name, shape, layout.chunks(shape, replica))


def _check_listed(name: str, shape: tuple[int, ...], chunks: Chunks) -> None:
    # offsets + sizes could overflow.
    beyond = chunks.offsets > np.array(shape, np.int64) - chunks.sizes
    if (chunks.offsets < 0).any() or (chunks.sizes <= 0).any() or beyond.any():
        raise CorruptCheckpointError(
            f"{name}: a chunk lies outside shape {shape}, or is empty", key=name
        )
    held, needed = sum(math.prod(sizes) for sizes in chunks.sizes.tolist()), math.prod(shape)
    if held < needed:
        raise CorruptCheckpointError(
            f"{name}: the chunks hold {held} of {needed} elements", key=name
        )
    if held > needed or (len(chunks) > 1 and not _is_tiled(shape, chunks)):
        raise CorruptCheckpointError(f"{name}: the listed chunks overlap", key=name)


def _is_tiled(shape: tuple[int, ...], chunks: Chunks) -> bool:
    """Whether every element of the tensor is in exactly one of the chunks.

    In time that grows with the chunks, however they lie: comparing those that are open together takes their
    square where someone has laid them out for it.

    Source: the indicator of a box is a product over the dims of (step at its start - step at its stop). As
    polynomials with one indeterminate per coordinate of each dim, the chunks' products add up to the whole's
    if and only if the boxes tile it (two tilings of lattice points differ in a monomial). Polynomials of
    degree d that differ agree at a random point modulo p with a probability of at most d / p
    (Schwartz-Zippel): here below 2^-78, at points that no one can know before.
    """
    random = np.random.default_rng()  # the system's entropy, not the random state of the training
    products = np.ones((ROUNDS, len(chunks) + 1), np.int64)
    for dim, length in enumerate(shape):
        # The whole is the last box.
        starts = np.append(chunks.offsets[:, dim], 0)
        stops = np.append(chunks.offsets[:, dim] + chunks.sizes[:, dim], length)
        if not starts.any() and (stops == length).all():
            continue  # a factor that all have
        coordinates, at = np.unique(np.concatenate((starts, stops)), return_inverse=True)
        points = random.integers(0, PRIME, (ROUNDS, len(coordinates)))
        first, last = at[: len(starts)], at[len(starts) :]
        products = products * (points[:, first] - points[:, last]) % PRIME
    held = products[:, :-1].sum(axis=1) % PRIME
    return bool((held == products[:, -1]).all())
