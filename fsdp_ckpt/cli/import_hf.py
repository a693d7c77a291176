"""``fsdp-ckpt import HF_DIR ROOT``: a Hugging Face model as the checkpoint of step 0 of a new run."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from fsdp_ckpt.cli.arguments import add_json, add_threads, positive
from fsdp_ckpt.cli.text import bytes_text, print_json, print_line
from fsdp_ckpt.hf.importer import import_model

if TYPE_CHECKING:
    from fsdp_ckpt.cli.arguments import Commands

__all__ = ["add_parser", "run"]


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "import",
        help="make a Hugging Face model the checkpoint of step 0 of a new run",
        description="Write a Hugging Face model (model.safetensors, or several files and their index) as the "
        "checkpoint of step 0 of a new run, dtypes as they are, without the model ever being in memory.",
    )
    parser.add_argument("source", metavar="HF_DIR", help="the model's folder, a path or URL")
    parser.add_argument("root", metavar="ROOT", help="the new run's root, a path or URL")
    parser.add_argument(
        "--world-size",
        type=positive,
        default=1,
        metavar="N",
        help="shard files to write: with as many as ranks, each rank reads one from start to end (1)",
    )
    add_threads(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Import; return the exit code."""
    report = import_model(
        arguments.source,
        arguments.root,
        world_size=arguments.world_size,
        num_threads=arguments.threads,
    )
    if arguments.json:
        print_json(dataclasses.asdict(report))
    else:
        print_line(
            f"{report.source} -> {report.output}: {report.num_tensors} tensors, "
            f"{bytes_text(report.total_bytes)}, for {report.world_size} rank(s)"
        )
    return 0
