"""The model's weights in a checkpoint, and verified reading of parts of them.

A tied weight is a tensor under its first name and a value for every further one, so the tensors are what
``save_pretrained`` would write: each once.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from fsdp_ckpt.commit.checkpoint import Checkpoint, Piece
from fsdp_ckpt.errors import MismatchError, NotFoundError
from fsdp_ckpt.hf.layout import Region
from fsdp_ckpt.manifest.schema import Manifest, TensorRow
from fsdp_ckpt.manifest.tree import path_name
from fsdp_ckpt.plan.box import relative_slices
from fsdp_ckpt.plan.dtypes import itemsize

__all__ = ["check_source", "left_out_names", "model_rows", "read_window"]


def model_rows(checkpoint: Checkpoint) -> tuple[TensorRow, ...]:
    """Return the rows of the model's tensors, in the checkpoint's order.

    Raises:
        NotFoundError: The checkpoint holds no model.
        MismatchError: A part of the model is each rank's own, so there is no one model.
    """
    manifest = checkpoint.manifest
    own = [path_name(path) for path in manifest.rank_local if _is_of_model(path)]
    if own:
        raise MismatchError(
            f"{checkpoint.store.url}: {own[0]} is each rank's own ({len(own)} such entries of the model); "
            "one model cannot hold them",
            step=manifest.step,
            key=own[0],
        )
    rows = tuple(row for row in manifest.tensors if _is_of_model(row.path))
    if not rows:
        raise NotFoundError(
            f"{checkpoint.store.url}: no model weights: no tensor under 'model' among "
            f"{len(manifest.tensors)} tensors",
            step=manifest.step,
        )
    return rows


def left_out_names(manifest: Manifest) -> tuple[str, ...]:
    """Return the model's values that are no tensors (``_extra_state``), which safetensors cannot hold."""
    return tuple(path_name(path[1:]) for path in manifest.values if _is_of_model(path))


def _is_of_model(path: tuple[object, ...]) -> bool:
    return path[0] == "model" and len(path) > 1


def check_source(checkpoint: Checkpoint, num_threads: int) -> None:
    """Prove that every file is there in full and has a whole header; reads no data.

    Raises:
        CorruptCheckpointError: One is missing, short or damaged.
    """
    checkpoint.check_files()
    with ThreadPoolExecutor(num_threads, "fsdp_ckpt-headers") as threads:
        for _ in threads.map(checkpoint.header, range(checkpoint.manifest.world_size)):
            pass


def read_window(
    checkpoint: Checkpoint, window: Sequence[Region], buffer: memoryview, num_threads: int
) -> memoryview:
    """Read the regions of a window, verified, one after the other into ``buffer``.

    Args:
        checkpoint: Where from.
        window: Regions without gaps between them.
        buffer: At least the window's bytes.
        num_threads: Reads in flight.

    Returns:
        The filled part of ``buffer``.

    Raises:
        CorruptCheckpointError: A source file is missing, short or damaged.
        StorageError: The store failed.
    """
    origin = window[0].byte_offset
    parts: dict[int, list[tuple[Piece, np.ndarray]]] = {}
    found_bytes = 0
    for region in window:
        num_bytes = itemsize(region.row.dtype)
        start = region.byte_offset - origin
        flat = np.frombuffer(buffer[start : start + region.num_bytes], np.uint8)
        whole = flat.reshape(*region.box.sizes, num_bytes)
        for piece in checkpoint.pieces(region.row, region.box):
            target = whole[relative_slices(piece.region, region.box)]
            parts.setdefault(piece.rank, []).append((piece, target))
            found_bytes += target.nbytes
    total = sum(region.num_bytes for region in window)
    if found_bytes != total:
        raise AssertionError(f"pieces of {found_bytes} bytes for a window of {total}")

    def copy(part: Sequence[tuple[Piece, np.ndarray]]) -> None:
        images = checkpoint.read([piece for piece, _ in part], max(num_threads // len(parts), 1))
        for piece, target in part:
            target[...] = images.array(piece)

    with ThreadPoolExecutor(num_threads, "fsdp_ckpt-consolidate") as threads:
        for _ in threads.map(copy, parts.values()):
            pass
    return buffer[:total]
