"""``fsdp-ckpt verify CHECKPOINT``: whether a checkpoint is what was written, to the last byte."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fsdp_ckpt.cli.arguments import add_checkpoint, add_json, open_named, positive
from fsdp_ckpt.cli.durations import duration_text
from fsdp_ckpt.cli.progress import ProgressLine
from fsdp_ckpt.cli.text import bytes_text, fail, print_json, print_line
from fsdp_ckpt.commit.checkpoint import Checkpoint
from fsdp_ckpt.commit.verify import find_damage
from fsdp_ckpt.errors import CorruptCheckpointError

if TYPE_CHECKING:
    from fsdp_ckpt.cli.arguments import Commands

__all__ = ["add_parser", "run"]


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "verify",
        help="read a checkpoint in full and compare every digest",
        description="Check sizes, coverage and the digest of every block. Exit code 1: damaged.",
    )
    add_checkpoint(parser)
    parser.add_argument(
        "--fast",
        action="store_true",
        help="compare sizes, headers and coverage, without reading the data",
    )
    parser.add_argument(
        "--threads", type=positive, metavar="N", help="reads in flight; as suits the store"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Verify; return the exit code."""
    checkpoint = open_named(arguments)
    start = time.monotonic()
    damage = _find(checkpoint, arguments)
    elapsed_s = time.monotonic() - start
    manifest = checkpoint.manifest
    if arguments.json:
        print_json(
            {
                "url": checkpoint.store.url,
                "step": manifest.step,
                "attempt": manifest.attempt,
                "num_files": manifest.world_size,
                "num_tensors": len(manifest.tensors),
                "num_bytes": sum(file.num_bytes for file in manifest.files),
                "reads_data": not arguments.fast,
                "elapsed_s": round(elapsed_s, 3),
                "is_whole": not damage,
                "damage": [str(error) for error in damage],
                "damaged_ranks": sorted({e.rank for e in damage if e.rank is not None}),
            }
        )
    else:
        _print_text(checkpoint, damage, elapsed_s, reads_data=not arguments.fast)
    if damage:
        return fail(
            f"{checkpoint.store.url}: damaged in {len(damage)} place(s); restore an older checkpoint, and "
            "fsdp-ckpt prune keeps this one until its folder is removed by hand"
        )
    return 0


def _find(checkpoint: Checkpoint, arguments: argparse.Namespace) -> list[CorruptCheckpointError]:
    line = ProgressLine()
    try:
        return list(
            find_damage(
                checkpoint,
                arguments.threads,
                reads_data=not arguments.fast,
                on_progress=line.show,
            )
        )
    finally:
        line.close()


def _print_text(
    checkpoint: Checkpoint,
    damage: Sequence[CorruptCheckpointError],
    elapsed_s: float,
    *,
    reads_data: bool,
) -> None:
    manifest = checkpoint.manifest
    for error in damage:
        print_line(str(error), "red")
    num_bytes = sum(file.num_bytes for file in manifest.files)
    how = "data not read"
    if reads_data:
        rate = bytes_text(int(num_bytes / max(elapsed_s, 1e-9)))
        how = f"read in {duration_text(elapsed_s)} at {rate}/s"
    verdict = f"DAMAGED in {len(damage)} places" if damage else "whole"
    print_line(
        f"{checkpoint.store.url}: step {manifest.step}, {len(manifest.tensors)} tensors in "
        f"{manifest.world_size} files, {bytes_text(num_bytes)}, {how}: {verdict}",
        "bold red" if damage else "green",
    )
