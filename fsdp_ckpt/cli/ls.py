"""``fsdp-ckpt ls ROOT``: which checkpoints a run has."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fsdp_ckpt.cli.arguments import add_json, add_root, no_checkpoint
from fsdp_ckpt.cli.text import age_text, bytes_text, print_json, print_table
from fsdp_ckpt.commit.catalog import CheckpointInfo, SkippedCheckpoint, find_checkpoints
from fsdp_ckpt.storage.open import open_store

if TYPE_CHECKING:
    from fsdp_ckpt.cli.arguments import Commands

__all__ = ["add_parser", "run"]


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "ls",
        help="list a run's checkpoints, newest first",
        description="List a run's checkpoints, newest first, and apart from them what is torn, damaged, or "
        "on a branch that the run left. Exit code 0: there is a whole one, and none is damaged. Compares "
        "file sizes; verify reads all.",
    )
    add_root(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """List; return the exit code."""
    store = open_store(arguments.root)
    found = list(find_checkpoints(store))
    whole = [f for f in found if isinstance(f, CheckpointInfo)]
    skipped = [f for f in found if isinstance(f, SkippedCheckpoint)]
    if not found:
        raise no_checkpoint(store)
    if arguments.json:
        print_json(
            {
                "root": store.url,
                "checkpoints": [dataclasses.asdict(f) for f in whole],
                "skipped": [dataclasses.asdict(f) for f in skipped],
            }
        )
    else:
        _print_text(whole, skipped)
    return 0 if whole and all(f.torn or f.abandoned for f in skipped) else 1


def _print_text(whole: Sequence[CheckpointInfo], skipped: Sequence[SkippedCheckpoint]) -> None:
    if whole:
        rows = [
            (
                f.step,
                age_text(f.created),
                bytes_text(f.num_bytes),
                f.world_size,
                f.generation,
                f.attempt,
            )
            for f in whole
        ]
        print_table(
            ("STEP", "AGE", "SIZE", "RANKS", "GENERATION", "ATTEMPT"), rows, right=(0, 1, 2, 3, 4)
        )
    if skipped:
        if whole:
            print()
        passed = [(f.step, _kind(f), f.reason) for f in skipped]
        print_table(("STEP", "SKIPPED", "REASON"), passed, right=(0,))


def _kind(skipped: SkippedCheckpoint) -> str:
    if skipped.torn:
        return "torn"
    return "left" if skipped.abandoned else "damaged"
