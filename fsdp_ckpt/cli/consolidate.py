"""``fsdp-ckpt consolidate CHECKPOINT OUT``: a checkpoint's model as Hugging Face files."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING

from fsdp_ckpt.cli.arguments import add_checkpoint, add_json, parse_size, positive, warn_of_skipped
from fsdp_ckpt.cli.text import bytes_text, print_json
from fsdp_ckpt.hf.consolidate import consolidate

if TYPE_CHECKING:
    from fsdp_ckpt.cli.arguments import Commands

__all__ = ["add_parser", "run"]


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "consolidate",
        help="write a checkpoint's model as Hugging Face safetensors",
        description="Write a checkpoint's model weights as Hugging Face safetensors files with their index, "
        "dtypes as saved, without the model ever being in memory.",
    )
    add_checkpoint(parser)
    parser.add_argument("out", metavar="OUT", help="the output folder, a path or URL")
    parser.add_argument(
        "--max-shard-size",
        type=parse_size,
        default=parse_size("5GB"),
        metavar="SIZE",
        help="most bytes of tensors in a file: 5GB (default), 500MB, 1GiB",
    )
    parser.add_argument(
        "--config-from",
        metavar="DIR",
        help="copy configuration and tokenizer files from here (*.json, *.txt, *.model, *.jinja)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the weights that are in OUT"
    )
    parser.add_argument(
        "--threads", type=positive, default=2, metavar="N", help="reads and writes in flight (2)"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Consolidate; return the exit code."""
    report = consolidate(
        arguments.checkpoint,
        arguments.out,
        step=arguments.step,
        max_shard_bytes=arguments.max_shard_size,
        config_from=arguments.config_from,
        overwrite=arguments.overwrite,
        num_threads=arguments.threads,
    )
    warn_of_skipped(report.skipped)
    for names, what in (
        (report.left_out, "left out, since safetensors holds tensors only"),
        (report.varying, "different on some ranks, the lowest rank's was written"),
    ):
        for name in names:
            print(f"fsdp-ckpt: warning: {name}: {what}", file=sys.stderr)
    if arguments.json:
        print_json(dataclasses.asdict(report))
    else:
        print(
            f"step {report.step} -> {report.output}: {report.num_tensors} tensors, "
            f"{bytes_text(report.total_bytes)}, in {len(report.files)} file(s)"
        )
    return 0
