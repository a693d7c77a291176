"""``fsdp-ckpt verify CHECKPOINT``: whether a checkpoint is what was written, to the last byte."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fsdp_ckpt.cli.arguments import add_checkpoint, add_json, open_named, positive
from fsdp_ckpt.cli.text import bytes_text, print_json
from fsdp_ckpt.commit.verify import find_damage

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
        "--threads", type=positive, default=2, metavar="N", help="reads in flight (2)"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Verify; return the exit code."""
    checkpoint = open_named(arguments)
    manifest = checkpoint.manifest
    damage = [str(error) for error in find_damage(checkpoint, arguments.threads)]
    num_bytes = sum(file.num_bytes for file in manifest.files)
    if arguments.json:
        print_json(
            {
                "url": checkpoint.store.url,
                "step": manifest.step,
                "attempt": manifest.attempt,
                "num_files": manifest.world_size,
                "num_tensors": len(manifest.tensors),
                "num_bytes": num_bytes,
                "is_whole": not damage,
                "damage": damage,
            }
        )
    else:
        for line in damage:
            print(line)
        print(
            f"{checkpoint.store.url}: step {manifest.step}, {len(manifest.tensors)} tensors in "
            f"{manifest.world_size} files, {bytes_text(num_bytes)}: "
            f"{f'DAMAGED in {len(damage)} places' if damage else 'whole'}"
        )
    return 1 if damage else 0
