"""From a model in training to Hugging Face files, window by window.

    live shards -> agreement -> files -> per round: a window of each file that is being written
                                         ranks --messages--> its owner -> file
                -> publish, the index last

Invariant: no rank holds more of the model than its own shards and the windows of a round; training's state is
only read.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_ckpt.dcp.agreement import Agreement, agree
from fsdp_ckpt.dcp.leaves import LIVE_TENSOR
from fsdp_ckpt.dcp.live import dtype_name
from fsdp_ckpt.dcp.save_planner import ShardSavePlanner
from fsdp_ckpt.dcp.summary import Summary
from fsdp_ckpt.errors import CheckpointError, MismatchError
from fsdp_ckpt.hf.cast import FLOATING
from fsdp_ckpt.hf.layout import OutputFile, OutputTensor, index_of, lay_out_files
from fsdp_ckpt.hf.output import OutputFolder, open_output, read_companions
from fsdp_ckpt.manifest.schema import TensorRow
from fsdp_ckpt.manifest.tree import path_name
from fsdp_ckpt.ranks.group import RankGroup
from fsdp_ckpt.state.model import model_tensors
from fsdp_ckpt.storage.in_order import InOrderWriter
from fsdp_ckpt.storage.open import open_store
from fsdp_ckpt.weights.gather import Window, gather_windows

__all__ = ["ExportOptions", "ExportReport", "export"]

# A multiple of every element size, so that windows begin at elements.
WINDOW_BYTES = 128 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """What an export did, the same on all ranks.

    Args:
        output: The output folder.
        files: Names of the weight files, in order.
        companions: Names of the small files copied beside them.
        num_tensors: Tensors written, each tied one once.
        total_bytes: Bytes of all tensors.
        left_out: Entries of the model that are no tensors (``_extra_state``).
        varying: Tensors of which ranks hold different contents; the lowest rank's was written.
        overflows: Name → finite numbers that became infinite.
    """

    output: str
    files: tuple[str, ...]
    companions: tuple[str, ...]
    num_tensors: int
    total_bytes: int
    left_out: tuple[str, ...]
    varying: tuple[str, ...]
    overflows: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """How an export goes.

    Args:
        dtype: What floating-point tensors become; by default they stay as they are.
        allow_overflow: Write infinities where ``dtype`` is too narrow, instead of refusing.
        max_shard_bytes: Most bytes of tensors in a file; a larger tensor has a file to itself.
        num_writers: Ranks that write, each its share of the files; more than one only where all of them
            reach the same folder.
        num_threads: Writes in flight, per file.
        timeout_s: How long a rank waits for the others in one exchange, in seconds.
    """

    dtype: torch.dtype | None = None
    allow_overflow: bool = False
    max_shard_bytes: int = 5_000_000_000
    num_writers: int = 1
    num_threads: int = 2
    timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        for name in ("max_shard_bytes", "num_writers", "num_threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, 1 or more expected")
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise ValueError(f"dtype is {self.dtype}, a floating-point one expected")


def export(
    model: nn.Module,
    out_url: str | os.PathLike[str],
    *,
    config_from: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    options: ExportOptions | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ExportReport:
    """Write a live model as Hugging Face safetensors files; called by every rank, with the same arguments.

    Between two steps of training, which it does not change.

    Args:
        model: Plain, or wrapped by FSDP2, FSDP1, DDP, tensor parallelism.
        out_url: The output folder; made where it does not exist.
        config_from: Folder of which configuration and tokenizer files are copied.
        overwrite: Replace the weights, and files copied from ``config_from``, that are in the folder.
        options: How it goes.
        storage_options: Passed to the fsspec filesystem of those URLs that are not local.

    Raises:
        AlreadyCommittedError: The output folder is not empty.
        MismatchError: Ranks contradict each other about the model, or numbers overflow ``dtype``.
        NotFoundError: Nothing to copy in ``config_from``.
        UnencodableStateError: A dtype that safetensors does not have, or a meta tensor.
        StorageError: The store failed; nothing was published.
        RankFailureError: A rank did not answer in time.
    """
    options = options or ExportOptions()
    group = RankGroup.of(options.timeout_s)
    exporting = _Export(model, group, options)
    fs_options = dict(storage_options or {})
    store = open_store(out_url, **fs_options)

    def prepare() -> list[Any]:
        origin = None if config_from is None else open_store(config_from, **fs_options)
        companions = {} if origin is None else read_companions(origin)
        output = open_output(store, companions, overwrite=overwrite)
        output.begin({file.name: file.num_bytes for file in exporting.files})
        exporting.output = output
        return [output.token, list(companions)]

    token, companions = group.coordinate(f"opening {store.url}", prepare)
    if not group.is_coordinator:
        # What the coordinator has begun is not empty any more.
        exporting.output = open_output(store, {}, overwrite=True)
        exporting.output.join(token)
    exporting.run()
    return exporting.report(store.url, companions)


class _Export:
    """One export, on this rank."""

    output: OutputFolder

    def __init__(self, model: nn.Module, group: RankGroup, options: ExportOptions) -> None:
        self._group = group
        self._options = options
        self._planner = ShardSavePlanner()
        self._agreement = self._agree(model)
        self._rows: dict[str, TensorRow] = {
            path_name(row.path[1:]): row for row in self._agreement.tensors
        }
        tensors = [
            OutputTensor(name=name, dtype=self._dtype(row.dtype), shape=row.shape)
            for name, row in self._rows.items()
        ]
        self.files = lay_out_files(tensors, options.max_shard_bytes)
        self._writers: dict[str, InOrderWriter] = {}
        self._overflows: Counter[str] = Counter()

    def _agree(self, model: nn.Module) -> Agreement:
        group, planner = self._group, self._planner

        def look() -> Summary:
            state = model_tensors(model).state_dict()
            tensors = {name: t for name, t in state.items() if isinstance(t, LIVE_TENSOR)}
            self._left_out = tuple(name for name in state if name not in tensors)
            planner.set_up({"model": tensors}, rank=group.rank, world_size=group.world_size)
            return planner.summary()

        summary = group.run("describing the model", look)
        if group.all_equal(summary.fingerprint()):
            agreement = agree([summary] * group.world_size)
        else:
            agreement = agree([Summary.from_json(s) for s in group.gather(summary.to_json())])
        planner.accept(agreement, group.rank, group.world_size)
        return agreement

    def _dtype(self, dtype: str) -> str:
        target = self._options.dtype
        return dtype_name(target) if target is not None and dtype in FLOATING else dtype

    def run(self) -> None:
        """Write all files and publish them; called by every rank."""
        group = self._group
        try:
            device = group.run("exporting the model", _message_device)
            for windows in self._rounds():
                group.run("exporting the model", lambda w=windows: self._write(w, device))  # type: ignore[misc]  # the default binds it
            self._judge_overflows()
            group.coordinate(
                "publishing the model", lambda: self.output.publish(index_of(self.files))
            )
        except BaseException:
            for writer in self._writers.values():
                with suppress(CheckpointError):  # the first error is the one to know
                    writer.abort()
            if group.is_coordinator:
                self.output.discard()
            raise
        finally:
            self._planner.forget()

    def _rounds(self) -> Iterator[Sequence[Window]]:
        """Yield the windows that are written at the same time: one of each writing rank's file."""
        count = min(self._options.num_writers, self._group.world_size)
        for first in range(0, len(self.files), count):
            files = self.files[first : first + count]
            per_file = (self._windows(file, owner) for owner, file in enumerate(files))
            for windows in zip_longest(*per_file):
                yield [window for window in windows if window is not None]

    def _windows(self, file: OutputFile, owner: int) -> Iterator[Window]:
        # A file without data has one window too: its header.
        for start in range(0, max(file.data_bytes, 1), WINDOW_BYTES):
            stop = min(start + WINDOW_BYTES, file.data_bytes)
            yield Window(file=file, owner=owner, start=start, stop=stop, rows=self._rows)

    def _write(self, windows: Sequence[Window], device: torch.device) -> None:
        parts_of: Callable[[str], Any] = lambda name: self._planner.parts(self._rows[name].name)  # noqa: E731
        data = gather_windows(windows, self._group.rank, parts_of, device, self._note_overflow)
        for window in windows:
            file = window.file
            if file.name not in data:
                continue
            if window.start == 0:
                raw = self.output.write(file.name, file.num_bytes)
                writer = InOrderWriter(raw, file.num_bytes, self._options.num_threads)
                self._writers[file.name] = writer
                writer.write_at(0, memoryview(file.header))
            writer = self._writers[file.name]
            writer.write_at(len(file.header) + window.start, data[file.name])
            if window.stop == file.data_bytes:
                writer.commit()
                del self._writers[file.name]

    def _note_overflow(self, name: str, count: int) -> None:
        self._overflows[name] += count

    def _judge_overflows(self) -> None:
        total: Counter[str] = Counter()
        for counts in self._group.gather(dict(self._overflows)):
            total.update(counts)
        self._overflows = total
        if total and not self._options.allow_overflow:
            name, count = total.most_common(1)[0]
            raise MismatchError(
                f"{sum(total.values())} numbers of {len(total)} tensors are too large for "
                f"{self._options.dtype}, {count} of them in {name}; choose another dtype, or pass "
                "allow_overflow=True to write infinities",
                key=name,
            )

    def report(self, url: str, companions: Sequence[str]) -> ExportReport:
        """Say what was done."""
        return ExportReport(
            output=url,
            files=tuple(file.name for file in self.files),
            companions=tuple(companions),
            num_tensors=len(self._rows),
            total_bytes=sum(file.data_bytes for file in self.files),
            left_out=self._left_out,
            varying=tuple(path_name(path[1:]) for path in self._agreement.varying),
            overflows=dict(self._overflows),
        )


def _message_device() -> torch.device:
    """Return where the process group takes tensors from."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return torch.device("cpu")
    # NCCL makes its connections at the first call that all ranks take part in; messages are not.
    dist.barrier()
    if "cpu" in dist.get_backend_config():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
