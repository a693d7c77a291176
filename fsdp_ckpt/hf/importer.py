"""From Hugging Face files to a committed checkpoint at step 0, which holds the model and no training state.

    headers -> rows ["model", name] -> shard files -> manifest, published last

A name of the files becomes the same name of the model; which of its names are one tensor is the model's to
say, when it is restored.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_ckpt.commit.catalog import list_steps, step_folder
from fsdp_ckpt.commit.publish import holds_checkpoint
from fsdp_ckpt.commit.source_images import Piece, SourceImages
from fsdp_ckpt.errors import AlreadyCommittedError
from fsdp_ckpt.hf.checkpoint_writing import place_rows, write_checkpoint
from fsdp_ckpt.hf.model_files import ModelFiles, open_model_files
from fsdp_ckpt.manifest.schema import Manifest, TensorRow
from fsdp_ckpt.plan.box import Box
from fsdp_ckpt.plan.targets import sharded_layout
from fsdp_ckpt.storage.open import open_store
from fsdp_ckpt.storage.store import Store

__all__ = ["ImportReport", "import_model", "refuse_run"]

# What :class:`fsdp_ckpt.Progress` saves before the first step.
_START = {("progress", name): 0 for name in ("step", "epoch", "samples", "tokens")}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportReport:
    """What an import did.

    Args:
        source: The model's folder.
        output: The new checkpoint's folder.
        attempt: Id under which it was written.
        world_size: Number of its shard files.
        num_tensors: Tensors written.
        total_bytes: Bytes of all tensors.
    """

    source: str
    output: str
    attempt: str
    world_size: int
    num_tensors: int
    total_bytes: int


def import_model(
    source_url: str | os.PathLike[str],
    root_url: str | os.PathLike[str],
    *,
    world_size: int = 1,
    num_threads: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ImportReport:
    """Write a Hugging Face model as the checkpoint of step 0 of a new run; for one process.

    Training starts from it on any number of ranks and in any layout: the optimizer and everything else that
    the files do not hold start fresh.

    Args:
        source_url: Folder of ``model.safetensors``, or of several files and their index.
        root_url: The run's root; made where it does not exist.
        world_size: Number of shard files: as many as ranks, and each reads one.
        num_threads: Reads or writes in flight; by default as many as suit the stores.
        storage_options: Passed to the fsspec filesystem of those URLs that are not local.

    Raises:
        NotFoundError: No safetensors files there.
        CorruptCheckpointError: A file is short or malformed; nothing was published.
        AlreadyCommittedError: The root holds a checkpoint.
        StorageError: A store failed.
        ValueError: A number below 1.
    """
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}, 1 or more expected")
    options = dict(storage_options or {})
    root = open_store(root_url, **options)
    files = open_model_files(open_store(source_url, **options), num_threads)
    refuse_run(root)
    rows = place_rows([_row(row, world_size) for row in files.rows], world_size)
    draft = Manifest(step=0, attempt="", world_size=world_size, tensors=rows, values=_START)
    store = root.child(step_folder(0))
    manifest = write_checkpoint(store, draft, _ModelSource(files), num_threads=num_threads)
    return ImportReport(
        source=files.store.url,
        output=store.url,
        attempt=manifest.attempt,
        world_size=world_size,
        num_tensors=len(rows),
        total_bytes=sum(row.num_bytes for row in rows),
    )


def refuse_run(root: Store) -> None:
    """Refuse a root with a checkpoint: a restore takes the newest, not the model of step 0."""
    for step in list_steps(root):
        if holds_checkpoint(root.child(step_folder(step))):
            raise AlreadyCommittedError(
                f"{root.url}: a run is here already, with a checkpoint of step {step}; name a new root",
                step=step,
            )


def _row(row: TensorRow, world_size: int) -> TensorRow:
    layout = sharded_layout(world_size, is_sharded=bool(row.shape))
    return TensorRow(path=("model", row.name), dtype=row.dtype, shape=row.shape, layout=layout)


class _ModelSource:
    """The files' tensors under the names that they have in a checkpoint."""

    def __init__(self, files: ModelFiles) -> None:
        self._files = files

    def pieces(self, name: str, wanted: Box) -> Sequence[Piece]:
        return self._files.pieces(name.removeprefix("model."), wanted)

    def read(self, pieces: Iterable[Piece], num_threads: int | None = None) -> SourceImages:
        return self._files.read(pieces, num_threads)
