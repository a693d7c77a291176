"""What a consolidation tells: how far it is, and in the end what it has written."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from fsdp_ckpt.commit.catalog import SkippedCheckpoint
from fsdp_ckpt.hf.planning import Plan
from fsdp_ckpt.manifest.tree import path_name

__all__ = ["ConsolidateReport", "Meter", "Progress", "make_report"]

logger = logging.getLogger("fsdp_ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is.

    Args:
        done_bytes: Of the output's files; what a resumed run has found whole counts.
        total_bytes: Of all of them.
    """

    done_bytes: int
    total_bytes: int


class Meter:
    """Adds up what is written; used by one thread at a time.

    Args:
        sizes: Name → bytes of the output's files.
        whole: Names of those that a run that is resumed has left.
        on_progress: Told at the start and after every addition.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        whole: Collection[str],
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self._total = sum(sizes.values())
        self._done = sum(sizes[name] for name in whole)
        self._on_progress = on_progress
        if whole:
            logger.info("%d of %d files are there already", len(whole), len(sizes))
        self.add(0)

    def add(self, num_bytes: int) -> None:
        """Note that so many bytes more are written."""
        self._done += num_bytes
        if self._on_progress is not None:
            self._on_progress(Progress(done_bytes=self._done, total_bytes=self._total))


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
        sizes: Name of a weight file → its bytes.
        keys: Name of a weight file → names of its tensors, in the order of their bytes.
        left_out: Entries of what was asked for that are no tensors (``_extra_state``), or each rank's own.
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
    sizes: Mapping[str, int] = field(default_factory=dict)
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    varying: tuple[str, ...] = ()
    skipped: tuple[SkippedCheckpoint, ...] = ()


def make_report(
    plan: Plan, out_url: str, companions: Iterable[str], skipped: tuple[SkippedCheckpoint, ...]
) -> ConsolidateReport:
    """Describe what a plan writes into a folder."""
    manifest = plan.checkpoint.manifest
    varying = {path_name(path) for path in manifest.varying}
    return ConsolidateReport(
        step=manifest.step,
        attempt=manifest.attempt,
        source=plan.checkpoint.store.url,
        output=out_url,
        files=tuple(file.name for file in plan.files),
        companions=tuple(companions),
        num_tensors=len(plan.selected.tensors),
        total_bytes=sum(file.data_bytes for file in plan.files),
        sizes=plan.sizes,
        keys={file.name: tuple(t.name for t in file.tensors) for file in plan.files},
        left_out=plan.selected.left_out,
        varying=tuple(name for name, row in plan.selected.rows.items() if row.name in varying),
        skipped=skipped,
    )
