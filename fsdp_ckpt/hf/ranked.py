"""Consolidation on several ranks, for a source that one process reads too slowly.

Invariant: every source file is read by one rank. All ranks raise the same error or none, and the coordinator
publishes only when every file is whole.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

from fsdp_ckpt.errors import MismatchError
from fsdp_ckpt.hf.consolidate import Request, ending, prepare
from fsdp_ckpt.hf.output import OutputFolder
from fsdp_ckpt.hf.planning import Plan
from fsdp_ckpt.hf.ranked_copy import RankedCopy
from fsdp_ckpt.hf.report import ConsolidateReport, Meter
from fsdp_ckpt.hf.rounds import share_out
from fsdp_ckpt.hf.source import check_headers
from fsdp_ckpt.ranks.group import RankGroup

__all__ = ["consolidate_on_ranks"]


def consolidate_on_ranks(
    checkpoint_url: str | os.PathLike[str],
    out_url: str | os.PathLike[str],
    *,
    timeout_s: float = 600.0,
    **options: Any,
) -> ConsolidateReport:
    """Do what :func:`consolidate` does, on all ranks of the default process group together.

    Called by every rank with the same arguments. All ranks see both folders. The output is the same to the
    bit as that of one process.

    Args:
        checkpoint_url: As in :func:`consolidate`.
        out_url: As in :func:`consolidate`.
        timeout_s: Deadline of every exchange, in seconds.
        **options: As in :func:`consolidate`; progress is told on rank 0.

    Returns:
        What was written, on every rank.

    Raises:
        CheckpointError: As in :func:`consolidate`, on every rank.
        RankFailureError: A rank died or did not answer in time.
    """
    group = RankGroup.of(timeout_s)
    request = Request(**options)
    prepared = group.run("planning", lambda: prepare(checkpoint_url, out_url, request))
    plan, output, report = prepared.plan, prepared.output, prepared.report
    if not group.all_equal(plan.fingerprint):
        raise MismatchError("the ranks see different checkpoints; name a step, and run again")
    if request.dry_run:
        return report
    readers = share_out([f.num_bytes for f in plan.checkpoint.manifest.files], group.world_size)
    mine = [source for source, reader in enumerate(readers) if reader == group.rank]
    threads = request.copying.num_threads
    group.run("checking the source", lambda: check_headers(plan.checkpoint, mine, threads))
    # What goes wrong from here on is for the coordinator to clean up.
    with ending(prepared) if group.is_coordinator else nullcontext():
        begun = group.coordinate("beginning", lambda: _begin(output, plan))
        output.join(begun["token"])
        files = [file for file in plan.files if file.name not in begun["whole"]]
        on_progress = request.on_progress if group.is_coordinator else None
        meter = Meter(plan.sizes, begun["whole"], on_progress)
        RankedCopy(plan, files, readers, output, request.copying, group).run(meter.add)
        group.coordinate("publishing", lambda: output.publish(plan.index))
    return report


def _begin(output: OutputFolder, plan: Plan) -> dict[str, Any]:
    return {"whole": sorted(output.begin(plan.sizes)), "token": output.token}
