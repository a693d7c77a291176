"""From Hugging Face files into a live model, sharded in any way.

    headers (the coordinator, for all) -> compare -> each rank reads its ranges -> all have theirs -> copy

Invariant: nothing live changes before every rank holds its bytes; what does not fit is one error before that.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fsdp_ckpt.commit.source_images import SourceImages
from fsdp_ckpt.dcp.live import torch_dtype
from fsdp_ckpt.dcp.load_planner import ReshardLoadPlanner
from fsdp_ckpt.dcp.pieces import piece_tensor
from fsdp_ckpt.errors import MismatchError
from fsdp_ckpt.hf.model_files import ModelFile, ModelFiles, open_model_files
from fsdp_ckpt.manifest.schema import Manifest
from fsdp_ckpt.plan.box import Box
from fsdp_ckpt.ranks.group import RankGroup
from fsdp_ckpt.state.flat_units import free_gathered
from fsdp_ckpt.state.model import ModelTensors, model_tensors
from fsdp_ckpt.state.planning import plan_model
from fsdp_ckpt.state.saved import RestorePlan, SavedState, SavedTensor
from fsdp_ckpt.storage.open import open_store
from fsdp_ckpt.storage.store import Store
from fsdp_ckpt.weights.meta import FreshMemory

__all__ = ["LoadReport", "load"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a load did, the same on all ranks but for ``read_bytes``.

    Args:
        source: The folder.
        files: Names of the weight files.
        read_bytes: Bytes of tensors that this rank has read for itself.
        missing: Names of the model that the files lack; they keep their values.
        unexpected: Names in the files that the model lacks.
        cast: Name → (dtype in the files, dtype here).
    """

    source: str
    files: tuple[str, ...]
    read_bytes: int
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    cast: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def load(
    model: nn.Module,
    url: str | os.PathLike[str],
    *,
    allow_missing: Iterable[str] = (),
    allow_unexpected: Iterable[str] = (),
    allow_cast: bool = False,
    device: torch.device | str | None = None,
    num_threads: int | None = None,
    timeout_s: float = 1800.0,
    storage_options: Mapping[str, Any] | None = None,
) -> LoadReport:
    """Load a model's weights; called by every rank, with the same arguments.

    Of tied tensors the files may hold any name, or all, where these are equal. Tensors on the meta device get
    memory, and stay tied.

    Args:
        model: Plain, or wrapped by FSDP2, FSDP1, DDP, tensor parallelism.
        url: Folder of ``model.safetensors``, or of several files and ``model.safetensors.index.json``.
        allow_missing: Patterns (``fnmatch``) of the model's names that the files may lack.
        allow_unexpected: Patterns of names in the files that the model may lack.
        allow_cast: Load into another dtype, by ``Tensor.copy_``'s rounding.
        device: Where meta tensors get memory; by default on the device of the model's mesh.
        num_threads: Reads in flight, per rank; by default as many as suit the store.
        timeout_s: How long a rank waits for the others in one exchange, in seconds.
        storage_options: Passed to the fsspec filesystem.

    Raises:
        NotFoundError: No safetensors files there.
        CorruptCheckpointError: A file is short or malformed, or the index does not fit the files.
        MismatchError: Names, shapes or dtypes differ; all of them in one error, nothing has changed.
        StorageError: The folder or a file cannot be read now.
        RankFailureError: A rank did not answer in time.
    """
    group = RankGroup.of(timeout_s)
    store = open_store(url, **(storage_options or {}))
    headers = group.coordinate(
        f"reading the headers of {store.url}",
        lambda: [file.to_json() for file in open_model_files(store, num_threads).files],
    )
    files = ModelFiles(store, [ModelFile.from_json(header) for header in headers])
    planner = ReshardLoadPlanner(
        allow_missing=allow_missing, allow_unexpected=allow_unexpected, allow_cast=allow_cast
    )
    loading = _Load(model, files, planner)

    def compare() -> list[str]:
        loading.compare(group.rank, device)
        return planner.unclaimed

    unclaimed = group.common("comparing the model", compare)
    group.run("comparing the model", lambda: _judge(planner, unclaimed, store))
    group.run("reading the model", lambda: loading.fetch(num_threads))
    group.run("loading the model", loading.apply)
    return LoadReport(
        source=store.url,
        files=tuple(file.name for file in files.files),
        read_bytes=loading.read_bytes,
        missing=tuple(planner.differences.missing),
        unexpected=tuple(planner.differences.unexpected),
        cast=dict(planner.differences.cast),
    )


def _judge(planner: ReshardLoadPlanner, unclaimed: Iterable[str], store: Store) -> None:
    try:
        planner.judge(unclaimed)
    except MismatchError as e:
        raise MismatchError(f"{store.url}: {e}") from e


class _Load:
    """One load, on this rank."""

    def __init__(self, model: nn.Module, files: ModelFiles, planner: ReshardLoadPlanner) -> None:
        self._model = model
        self._files = files
        self._planner = planner
        self._saved = {row.name: row for row in files.rows}
        self._leaves: dict[str, Any] = {}
        self._twins: list[tuple[str, str]] = []
        self.read_bytes = 0

    def compare(self, rank: int, device: torch.device | str | None) -> None:
        """Compare names, shapes and dtypes; allocates, but changes nothing live."""
        live = model_tensors(self._model)
        self._detached = live.detached
        self._fresh = FreshMemory(self._model, device)
        self._twins = list(_twins(live, self._saved))
        doubled = {second for _, second in self._twins}
        plan = RestorePlan()
        plan_model(self._fresh.stand_in(live), self._saved_state(doubled), plan)
        self._leaves = {path[1]: leaf for path, leaf in plan.leaves.items()}
        self._planner.set_up(
            {(name,): leaf for name, leaf in self._leaves.items()},
            Manifest(step=0, attempt="", world_size=1, tensors=self._files.rows),
            rank=rank,
            put=lambda path, value: None,
            missing=self._fresh.unsaved,
            problems=plan.problems,
            left_out=[(name,) for name in doubled],
        )

    def _saved_state(self, left_out: set[str]) -> SavedState:
        tensors = {
            ("model", name): SavedTensor(row.shape, torch_dtype(row.dtype), None)
            for name, row in self._saved.items()
            if name not in left_out
        }
        nothing: frozenset[Any] = frozenset()
        return SavedState(
            tensors=tensors, values={}, own=nothing, varying=nothing, world_size=1, seed=0
        )

    def fetch(self, num_threads: int | None) -> None:
        """Read this rank's ranges; nothing live changes.

        Raises:
            MismatchError: Names of one tensor stand for different ones in the files.
        """
        wanted = [
            (item, piece)
            for item in self._planner.create_local_plan().items
            for piece in self._files.pieces(
                item.storage_index.fqn, Box(tuple(item.storage_offsets), tuple(item.lengths))
            )
        ]
        twins = [
            (piece, twin)
            for _, piece in wanted
            for name, further in self._twins
            if name == piece.entry.name
            for twin in self._files.pieces(further, piece.region)
        ]
        pieces = [*(piece for _, piece in wanted), *(twin for _, twin in twins)]
        images = self._files.read(pieces, num_threads)
        for piece, twin in twins:
            if not (images.array(piece) == images.array(twin)).all():
                raise MismatchError(
                    f"{self._files.store.url}: {piece.entry.name} and {twin.entry.name} are one tensor here, "
                    "and differ in the files; untie them in the model, or leave one out of the files",
                    key=twin.entry.name,
                )
        self._wanted, self._images = wanted, images
        self.read_bytes = sum(images.array(piece).nbytes for piece in pieces)

    def apply(self) -> None:
        """Copy what was read into the model."""
        images: SourceImages = self._images
        with torch.no_grad():
            for item, piece in self._wanted:
                self._planner.resolve_tensor(item).detach().copy_(piece_tensor(images, piece))
        self._fresh.install()
        free_gathered(self._model)
        for name, detached in self._detached.items():
            if name in self._saved:
                detached.put(self._leaves[name])


def _twins(live: ModelTensors, saved: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Yield (name, further name) of tensors that are one in the model, and all of them in the files."""
    names: dict[str, list[str]] = {name: [name] for name in live.tensors}
    for name, first in live.tied.items():
        names[first].append(name)
    for group in names.values():
        known = [name for name in group if name in saved]
        yield from ((known[0], further) for further in known[1:])
