"""From a checkpoint of any number of ranks to the Hugging Face files of its model.

    manifest -> layout of the output -> per file: header, then window by window
                                        source files --verified--> buffer --> output file
             -> publish, the index last

Invariant: no more than two windows of the model are in memory, and no byte is written whose digest was not
checked. Damage ends the run before the output can be taken for a whole model.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fsspec.core import split_protocol

from fsdp_ckpt.commit.catalog import SkippedCheckpoint
from fsdp_ckpt.commit.checkpoint import Checkpoint
from fsdp_ckpt.commit.locate import locate_checkpoint
from fsdp_ckpt.errors import CheckpointError
from fsdp_ckpt.hf.layout import OutputFile, index_of, lay_out_files
from fsdp_ckpt.hf.output import open_output, read_companions
from fsdp_ckpt.hf.source import check_source, left_out_names, model_rows, read_window
from fsdp_ckpt.manifest.tree import path_name
from fsdp_ckpt.storage.in_order import InOrderWriter
from fsdp_ckpt.storage.open import open_store
from fsdp_ckpt.storage.store import ObjectWriter, Store

__all__ = ["ConsolidateReport", "consolidate"]

logger = logging.getLogger("fsdp_ckpt")

WINDOW_BYTES = 256 * 1024 * 1024
# Where a window's part of a source file ends inside a 4 MiB block, the next window reads that block again:
# with 16 MiB per file, at most a quarter more than the bytes needed.
WINDOW_BYTES_PER_FILE = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsolidateReport:
    """What a consolidation did.

    Args:
        step: Training step of the checkpoint.
        attempt: Id of the save that wrote it.
        source: The checkpoint's folder.
        output: The output folder.
        files: Names of the weight files, in order; the index is not among them.
        companions: Names of the small files copied beside them.
        num_tensors: Tensors written, each tied one once.
        total_bytes: Bytes of all tensors.
        left_out: Entries of the model that are no tensors (``_extra_state``).
        varying: Tensors of which ranks had different contents; the lowest rank's was written.
        skipped: Newer checkpoints under the root that were passed over, with the reason.
    """

    step: int
    attempt: str
    source: str
    output: str
    files: tuple[str, ...]
    companions: tuple[str, ...]
    num_tensors: int
    total_bytes: int
    left_out: tuple[str, ...] = ()
    varying: tuple[str, ...] = ()
    skipped: tuple[SkippedCheckpoint, ...] = ()


def consolidate(
    checkpoint_url: str | os.PathLike[str],
    out_url: str | os.PathLike[str],
    *,
    step: int | None = None,
    max_shard_bytes: int = 5_000_000_000,
    config_from: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    num_threads: int = 2,
    window_bytes: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ConsolidateReport:
    """Write a checkpoint's model as Hugging Face safetensors files, dtypes as saved; for one process.

    The same checkpoint and ``max_shard_bytes`` give the same bytes. The index is written last.

    Args:
        checkpoint_url: A run's root (its newest whole checkpoint is taken) or a checkpoint's folder.
        out_url: The output folder; made where it does not exist.
        step: Which checkpoint under the root.
        max_shard_bytes: Most bytes of tensors in a file; a larger tensor has a file to itself.
        config_from: Folder of which configuration and tokenizer files are copied.
        overwrite: Replace the weights, and files copied from ``config_from``, that are in the folder.
        num_threads: Reads and writes in flight.
        window_bytes: Bytes of the output in memory at a time, twice: read and put in order. By default the
            larger of 256 MiB and 16 MiB per source file.
        storage_options: Passed to the fsspec filesystem of those URLs that are not local.

    Returns:
        What was written.

    Raises:
        NotFoundError: No such checkpoint, no model in it, or nothing to copy in ``config_from``.
        CorruptCheckpointError: The checkpoint is damaged; no weights were published.
        AlreadyCommittedError: The output folder holds weights, or another file of a name to copy.
        MismatchError: A part of the model is each rank's own.
        UnencodableStateError: A dtype that safetensors does not have.
        StorageError: A store failed.
        ValueError: A size or number below 1.
    """
    for name, value in (("max_shard_bytes", max_shard_bytes), ("num_threads", num_threads)):
        if value < 1:
            raise ValueError(f"{name} is {value}, 1 or more expected")
    options = dict(storage_options or {})
    checkpoint, skipped = locate_checkpoint(_open(checkpoint_url, options), step)
    manifest = checkpoint.manifest
    rows = model_rows(checkpoint)
    files = lay_out_files(rows, max_shard_bytes)
    companions = {} if config_from is None else read_companions(_open(config_from, options))
    store = _open(out_url, options)
    output = open_output(store, companions, overwrite=overwrite)
    check_source(checkpoint, num_threads)
    buffer = _make_buffer(files, window_bytes, manifest.world_size)
    try:
        for file in files:
            num_bytes = len(file.header()) + file.data_bytes
            writer = InOrderWriter(output.write(file.name, num_bytes), num_bytes, num_threads)
            _write_file(checkpoint, file, writer, buffer, num_threads)
            logger.info(
                "wrote %s, %d bytes of tensors, for %s", file.name, file.data_bytes, store.url
            )
        output.publish(index_of(files))
    except BaseException:
        output.discard()
        raise
    written = {row.path for row in rows}
    return ConsolidateReport(
        step=manifest.step,
        attempt=manifest.attempt,
        source=checkpoint.store.url,
        output=store.url,
        files=tuple(file.name for file in files),
        companions=tuple(companions),
        num_tensors=len(rows),
        total_bytes=sum(file.data_bytes for file in files),
        left_out=left_out_names(manifest),
        varying=tuple(path_name(path[1:]) for path in manifest.varying if path in written),
        skipped=skipped,
    )


def _open(url: str | os.PathLike[str], options: Mapping[str, Any]) -> Store:
    """Open a store; options are for the remote side of a run, whose other side may well be local."""
    is_local = not isinstance(url, str) or split_protocol(url)[0] in (None, "file", "local")
    return open_store(url) if is_local else open_store(url, **options)


def _make_buffer(
    files: Sequence[OutputFile], window_bytes: int | None, num_source_files: int
) -> memoryview:
    if window_bytes is None:
        window_bytes = max(WINDOW_BYTES, WINDOW_BYTES_PER_FILE * num_source_files)
    # Not below the widest element; not above what any file needs.
    return memoryview(bytearray(min(max(window_bytes, 8), max(file.data_bytes for file in files))))


def _write_file(
    checkpoint: Checkpoint,
    file: OutputFile,
    writer: ObjectWriter,
    buffer: memoryview,
    num_threads: int,
) -> None:
    """Write one output file; it is whole and durable when this returns, and dropped when this raises."""
    try:
        header = file.header()
        writer.write_at(0, memoryview(header))
        position = len(header)
        for window in file.windows(len(buffer)):
            data = read_window(checkpoint, window, buffer, num_threads)
            writer.write_at(position, data)
            position += len(data)
        writer.commit()
    except BaseException:
        with suppress(CheckpointError):  # the first error is the one to know
            writer.abort()
        raise
