"""``fsdp-ckpt import-deepspeed DIR ROOT``: a checkpoint of DeepSpeed as the first one of a new run."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from fsdp_ckpt.cli.arguments import add_json, add_threads, positive
from fsdp_ckpt.cli.text import bytes_text, print_json, print_line, warn
from fsdp_ckpt.deepspeed.importer import import_deepspeed

if TYPE_CHECKING:
    from fsdp_ckpt.cli.arguments import Commands

__all__ = ["add_parser", "run"]


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "import-deepspeed",
        help="make a checkpoint of DeepSpeed the first one of a new run",
        description="Write a checkpoint of DeepSpeed's ZeRO stage 1, 2 or 3 as one of this package: FP32 "
        "weights, optimizer, counters and LR schedule. DeepSpeed need not be installed, nothing of the files "
        "is executed, and the model is never in memory.",
    )
    parser.add_argument(
        "source",
        metavar="DIR",
        help="the folder given to save_checkpoint, or a tag's; a path or URL",
    )
    parser.add_argument("root", metavar="ROOT", help="the new run's root, a path or URL")
    parser.add_argument("--tag", metavar="TAG", help="which checkpoint (the one that latest names)")
    parser.add_argument(
        "--world-size",
        type=positive,
        metavar="N",
        help="shard files to write: with as many as ranks, each rank reads one from start to end (as saved)",
    )
    parser.add_argument(
        "--widen",
        action="store_true",
        help="make FP32 of frozen parameters and buffers of 16 bits, for a model that has them so",
    )
    add_threads(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Import; return the exit code."""
    report = import_deepspeed(
        arguments.source,
        arguments.root,
        tag=arguments.tag,
        world_size=arguments.world_size,
        widen=arguments.widen,
        num_threads=arguments.threads,
    )
    for name in report.dropped:
        warn(f"{name}: left out")
    if arguments.json:
        print_json(dataclasses.asdict(report))
    else:
        print_line(
            f"{report.source} -> {report.output}: step {report.step}, {report.num_tensors} tensors, "
            f"{bytes_text(report.total_bytes)}, from {report.saved_world_size} rank(s) of stage "
            f"{report.stage} to {report.world_size} rank(s)"
        )
    return 0
