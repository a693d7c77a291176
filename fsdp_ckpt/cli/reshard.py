"""``fsdp-ckpt reshard CHECKPOINT OUT --world-size N``: shard files for another number of ranks."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from fsdp_ckpt.cli.arguments import add_checkpoint, add_json, add_threads, positive, warn_of_skipped
from fsdp_ckpt.cli.text import bytes_text, print_json, print_line, warn
from fsdp_ckpt.hf.reshard import reshard

if TYPE_CHECKING:
    from fsdp_ckpt.cli.arguments import Commands

__all__ = ["add_parser", "run"]


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "reshard",
        help="write a checkpoint anew for another number of ranks",
        description="Write a checkpoint's content anew, in shard files for N ranks of FSDP2, so that at "
        "the next start each rank reads one file from end to end. The source is not changed.",
    )
    add_checkpoint(parser)
    parser.add_argument("out", metavar="OUT", help="another run's root, a path or URL")
    parser.add_argument(
        "--world-size", type=positive, required=True, metavar="N", help="number of ranks"
    )
    parser.add_argument(
        "--drop",
        action="append",
        default=[],
        metavar="NAME",
        help="leave out names like this pattern, or a part such as data; may be given again",
    )
    add_threads(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Reshard; return the exit code."""
    report = reshard(
        arguments.checkpoint,
        arguments.out,
        world_size=arguments.world_size,
        step=arguments.step,
        drop=arguments.drop,
        num_threads=arguments.threads,
    )
    warn_of_skipped(report.skipped)
    for names, what in (
        (report.derived, "different on some ranks, the lowest rank's was written"),
        (report.dropped, "left out"),
    ):
        for name in names:
            warn(f"{name}: {what}")
    if arguments.json:
        print_json(dataclasses.asdict(report))
    else:
        print_line(
            f"step {report.step} -> {report.output}: {report.num_tensors} tensors, "
            f"{bytes_text(report.total_bytes)}, from {report.saved_world_size} to {report.world_size} rank(s)"
        )
    return 0
