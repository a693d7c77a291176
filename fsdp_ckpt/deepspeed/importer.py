"""From a DeepSpeed checkpoint to a committed one of the same step, from which any layout goes on.

tag --> files of all ranks --> state --> rows on today's ranks --> shard files --> manifest, published last
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_ckpt.commit.catalog import step_folder
from fsdp_ckpt.deepspeed.contents import open_contents
from fsdp_ckpt.deepspeed.folder import find_files, find_tag
from fsdp_ckpt.deepspeed.state import read_state
from fsdp_ckpt.deepspeed.tensors import PartedTensor, PartedTensors
from fsdp_ckpt.hf.cast import FLOATING
from fsdp_ckpt.hf.checkpoint_writing import place_rows, write_checkpoint
from fsdp_ckpt.hf.importer import refuse_run
from fsdp_ckpt.manifest.schema import Manifest, TensorRow
from fsdp_ckpt.manifest.tree import Path, path_name
from fsdp_ckpt.plan.targets import sharded_layout
from fsdp_ckpt.storage.open import open_store

__all__ = ["DeepSpeedReport", "import_deepspeed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedReport:
    """What an import did.

    Args:
        step: Optimizer steps done.
        source: Folder of the tag.
        output: The new checkpoint's folder.
        attempt: Id under which it was written.
        stage: ZeRO's.
        saved_world_size: Ranks that saved.
        world_size: Number of shard files.
        num_tensors: Tensors written.
        total_bytes: Bytes of all tensors.
        dropped: Names of what was left out, since it has no place in a checkpoint.
    """

    step: int
    source: str
    output: str
    attempt: str
    stage: int
    saved_world_size: int
    world_size: int
    num_tensors: int
    total_bytes: int
    dropped: tuple[str, ...] = ()


def import_deepspeed(
    source_url: str | os.PathLike[str],
    root_url: str | os.PathLike[str],
    *,
    tag: str | None = None,
    world_size: int | None = None,
    widen: bool = False,
    num_threads: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> DeepSpeedReport:
    """Write a checkpoint of ZeRO stage 1, 2 or 3 as one of this package; for one process, without DeepSpeed.

    Weights are the FP32 masters under the plain module's names, the optimizer's state lies by parameter.

    Args:
        source_url: The folder that was given to ``save_checkpoint``, or a tag's in it.
        root_url: A new run's root; made where it does not exist.
        tag: Which checkpoint of the folder; by default the one that ``latest`` names.
        world_size: Number of shard files, as many as ranks, and each reads one; by default as many as saved.
        widen: Make FP32 of frozen parameters and buffers of 16 bits, as they are in a model of FP32 that
            computes in mixed precision; an engine of DeepSpeed has them in 16 bits.
        num_threads: Reads or writes in flight; by default as many as suit the stores.
        storage_options: Passed to the fsspec filesystem of those URLs that are not local.

    Raises:
        NotFoundError: No checkpoint of DeepSpeed there, or no such tag.
        CorruptCheckpointError: A file is missing, short, malformed or of another checkpoint; nothing was
            published.
        UnencodableStateError: A file holds objects that could run code.
        MismatchError: The model is cut by other parallelism than ZeRO's.
        AlreadyCommittedError: The root holds a checkpoint.
        StorageError: A store failed.
        ValueError: A number below 1.
    """
    if world_size is not None and world_size < 1:
        raise ValueError(f"world_size is {world_size}, 1 or more expected")
    options = dict(storage_options or {})
    root = open_store(root_url, **options)
    folder = find_tag(open_store(source_url, **options), tag)
    refuse_run(root)
    contents = open_contents(folder, find_files(folder), num_threads)
    state = read_state(contents, widen=widen)
    num_ranks = world_size or len(contents.optimizer)
    rows = place_rows(
        [_row(path, tensor, num_ranks) for path, tensor in state.tensors.items()], num_ranks
    )
    draft = Manifest(
        step=state.step, attempt="", world_size=num_ranks, tensors=rows, values=state.values
    )
    store = root.child(step_folder(state.step))
    by_name = {path_name(path): tensor for path, tensor in state.tensors.items()}
    source = PartedTensors(folder, contents.keys, by_name)
    manifest = write_checkpoint(store, draft, source, num_threads=num_threads)
    return DeepSpeedReport(
        step=state.step,
        source=folder.url,
        output=store.url,
        attempt=manifest.attempt,
        stage=contents.optimizer[0].stage,
        saved_world_size=len(contents.optimizer),
        world_size=num_ranks,
        num_tensors=len(rows),
        total_bytes=sum(row.num_bytes for row in rows),
        dropped=state.dropped,
    )


def _row(path: Path, tensor: PartedTensor, world_size: int) -> TensorRow:
    is_sharded = bool(tensor.shape) and tensor.dtype in FLOATING
    layout = sharded_layout(world_size, is_sharded=is_sharded)
    return TensorRow(path=path, dtype=tensor.dtype, shape=tensor.shape, layout=layout)
