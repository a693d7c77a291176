"""From a checkpoint of any number of ranks to the Hugging Face files of its model, in one process.

    manifest -> plan of the output -> per file: header, then window by window
                                      source files --verified--> buffers --> output file
             -> publish, the index last

Invariant: no more than the buffers of the model is in memory, and no byte is written whose digest was not
checked. Damage ends the run before the output can be taken for a whole model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fsdp_ckpt.commit.locate import locate_checkpoint
from fsdp_ckpt.errors import CheckpointError, RankFailureError, StorageError
from fsdp_ckpt.hf.copying import CopyOptions, copy_files
from fsdp_ckpt.hf.output import OutputFolder, open_output, read_companions
from fsdp_ckpt.hf.planning import Plan, make_plan
from fsdp_ckpt.hf.report import ConsolidateReport, Meter, Progress, make_report
from fsdp_ckpt.hf.selection import Selection
from fsdp_ckpt.hf.source import check_headers
from fsdp_ckpt.storage.open import open_store

__all__ = ["ConsolidateReport", "Request", "consolidate", "ending", "prepare"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked for; see :func:`consolidate`."""

    step: int | None = None
    selection: Selection = field(default_factory=Selection)
    max_shard_bytes: int = 5_000_000_000
    config_from: str | os.PathLike[str] | None = None
    overwrite: bool = False
    resume: bool = False
    dry_run: bool = False
    copying: CopyOptions = field(default_factory=CopyOptions)
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    on_progress: Callable[[Progress], None] | None = None

    def __post_init__(self) -> None:
        if self.max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes is {self.max_shard_bytes}, 1 or more expected")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A run before it begins.

    Args:
        plan: What will be written.
        output: Where to.
        report: What the run returns.
    """

    plan: Plan
    output: OutputFolder
    report: ConsolidateReport


def consolidate(
    checkpoint_url: str | os.PathLike[str],
    out_url: str | os.PathLike[str],
    *,
    step: int | None = None,
    selection: Selection | None = None,
    max_shard_bytes: int = 5_000_000_000,
    config_from: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    resume: bool = False,
    dry_run: bool = False,
    copying: CopyOptions | None = None,
    storage_options: Mapping[str, Any] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> ConsolidateReport:
    """Write a checkpoint's model as Hugging Face safetensors files; for one process.

    The same checkpoint, selection and ``max_shard_bytes`` give the same bytes. The index is written last.

    Args:
        checkpoint_url: A run's root (its newest whole checkpoint is taken) or a checkpoint's folder.
        out_url: The output folder; made where it does not exist.
        step: Which checkpoint under the root.
        selection: Which tensors, under which names and as which dtypes; by default the model as it was saved.
        max_shard_bytes: Most bytes of tensors in a file; a larger tensor has a file to itself.
        config_from: Folder of which configuration and tokenizer files are copied.
        overwrite: Replace the weights, and files copied from ``config_from``, that are in the folder; other
            files in it stay.
        resume: Go on with an interrupted run of the same checkpoint and options, where there is one.
        dry_run: Only plan; writes nothing and reads no data.
        copying: Threads and memory.
        storage_options: Passed to the fsspec filesystem of those URLs that are not local.
        on_progress: Called now and then, by one thread at a time.

    Returns:
        What was written.

    Raises:
        NotFoundError: No such checkpoint, nothing of what is asked for in it, or nothing to copy in
            ``config_from``.
        CorruptCheckpointError: The checkpoint is damaged; no weights were published.
        AlreadyCommittedError: The output folder is not empty.
        MismatchError: Names meet, numbers overflow, or a part of the model is each rank's own.
        UnencodableStateError: A dtype that safetensors does not have.
        StorageError: A store failed; what is whole is kept for a run that resumes.
        ValueError: A size or number below 1.
    """
    request = Request(
        step=step,
        selection=selection or Selection(),
        max_shard_bytes=max_shard_bytes,
        config_from=config_from,
        overwrite=overwrite,
        resume=resume,
        dry_run=dry_run,
        copying=copying or CopyOptions(),
        storage_options=storage_options or {},
        on_progress=on_progress,
    )
    prepared = prepare(checkpoint_url, out_url, request)
    plan, output = prepared.plan, prepared.output
    if dry_run:
        return prepared.report
    world_size = plan.checkpoint.manifest.world_size
    check_headers(plan.checkpoint, range(world_size), request.copying.num_threads)
    with ending(prepared):
        whole = output.begin(plan.sizes)
        files = [file for file in plan.files if file.name not in whole]
        meter = Meter(plan.sizes, whole, on_progress)
        copy_files(plan, files, output, request.copying, meter.add)
        output.publish(plan.index)
    return prepared.report


def prepare(
    checkpoint_url: str | os.PathLike[str], out_url: str | os.PathLike[str], request: Request
) -> Prepared:
    """Look at both sides of a run and plan it; changes nothing. Errors as of :func:`consolidate`."""
    options = request.storage_options
    checkpoint, skipped = locate_checkpoint(open_store(checkpoint_url, **options), request.step)
    plan = make_plan(checkpoint, request.selection, request.max_shard_bytes)
    from_url = request.config_from
    companions = {} if from_url is None else read_companions(open_store(from_url, **options))
    store = open_store(out_url, **options)
    checkpoint.check_files()
    output = open_output(
        store,
        companions,
        overwrite=request.overwrite or request.dry_run,
        resumes=request.resume,
        fingerprint=plan.fingerprint,
        stem=plan.stem,
    )
    report = make_report(plan, store.url, companions, skipped)
    return Prepared(plan=plan, output=output, report=report)


@contextmanager
def ending(prepared: Prepared) -> Iterator[None]:
    """End a run that fails: where a later one may go on, what is whole stays; otherwise nothing does."""
    try:
        yield
    except BaseException as e:
        is_final = isinstance(e, CheckpointError) and not isinstance(
            e, StorageError | RankFailureError
        )
        if is_final:
            prepared.output.discard()
            raise
        kept = prepared.output.keep()
        if not kept or not isinstance(e, StorageError):
            raise
        raise StorageError(
            f"{e}; {len(kept)} of {len(prepared.plan.files)} files are whole and kept in "
            f"{prepared.report.output}: see to it, and run again with resume",
            retryable=e.retryable,
            key=e.key,
        ) from e
