"""``fsdp-ckpt consolidate CHECKPOINT OUT``: a checkpoint's model as Hugging Face files.

Under torchrun, ``torchrun --nproc-per-node 4 -m fsdp_ckpt consolidate ...``, the ranks share the reading.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from typing import TYPE_CHECKING, Any, get_args

from fsdp_ckpt.cli.arguments import (
    add_checkpoint,
    add_json,
    add_patterns,
    parse_dtype,
    parse_rename,
    parse_size,
    positive,
    read_key_map,
    warn_of_skipped,
)
from fsdp_ckpt.cli.progress import ProgressLine
from fsdp_ckpt.cli.text import bytes_text, print_json, print_line, print_table, warn
from fsdp_ckpt.errors import CheckpointError
from fsdp_ckpt.hf.consolidate import consolidate
from fsdp_ckpt.hf.copying import CopyOptions
from fsdp_ckpt.hf.report import ConsolidateReport
from fsdp_ckpt.hf.selection import Selection, What

if TYPE_CHECKING:
    from fsdp_ckpt.cli.arguments import Commands

__all__ = ["add_parser", "run"]

SHOWN = 5


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "consolidate",
        help="write a checkpoint's model as Hugging Face safetensors",
        description="Write a checkpoint's model weights as Hugging Face safetensors files with their index, "
        "without the model ever being in memory.",
    )
    add_checkpoint(parser)
    parser.add_argument("out", metavar="OUT", help="the output folder, a path or URL")
    _add_selection(parser)
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
        "--resume", action="store_true", help="go on with an interrupted run of the same options"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="show files, sizes and keys; write nothing"
    )
    parser.add_argument(
        "--threads", type=positive, default=4, metavar="N", help="windows in work at a time (4)"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def _add_selection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--what",
        choices=get_args(What),
        default="model",
        help="model (default), the optimizer's state, the averaged model saved as extra['ema'], or all",
    )
    parser.add_argument(
        "--dtype",
        type=parse_dtype,
        metavar="DTYPE",
        help="convert floating-point tensors to bf16, fp16, fp32 or fp64; by default as saved",
    )
    parser.add_argument(
        "--allow-overflow",
        action="store_true",
        help="write infinity for numbers too large for DTYPE, instead of an error",
    )
    parser.add_argument("--prefix", default="", metavar="TEXT", help="put before every name")
    parser.add_argument(
        "--rename",
        action="append",
        default=[],
        type=parse_rename,
        metavar="OLD=NEW",
        help=r"replace every match of a regular expression in the names, such as ^module\.=; repeatable",
    )
    parser.add_argument(
        "--key-map",
        metavar="FILE",
        help="JSON object of names and what they become; goes before --rename",
    )
    add_patterns(parser)


def run(arguments: argparse.Namespace) -> int:
    """Consolidate; return the exit code."""
    selection = Selection(
        what=arguments.what,
        include=tuple(arguments.include),
        exclude=tuple(arguments.exclude),
        prefix=arguments.prefix,
        rename=tuple(arguments.rename),
        key_map={} if arguments.key_map is None else read_key_map(arguments.key_map),
        dtype=arguments.dtype,
    )
    line = ProgressLine()
    copying = CopyOptions(num_threads=arguments.threads, allow_overflow=arguments.allow_overflow)
    options: dict[str, Any] = {
        "step": arguments.step,
        "selection": selection,
        "max_shard_bytes": arguments.max_shard_size,
        "config_from": arguments.config_from,
        "overwrite": arguments.overwrite,
        "resume": arguments.resume,
        "dry_run": arguments.dry_run,
        "copying": copying,
        "on_progress": lambda at: line.show(at.done_bytes, at.total_bytes),
    }
    try:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            return _run_ranked(arguments, options)
        report = consolidate(arguments.checkpoint, arguments.out, **options)
    finally:
        line.close()
    _print(report, arguments)
    return 0


def _run_ranked(arguments: argparse.Namespace, options: dict[str, Any]) -> int:
    """Consolidate as one of the ranks that torchrun has started; rank 0 speaks for all."""
    # Not at the top: they load torch.
    from fsdp_ckpt.hf.ranked import consolidate_on_ranks
    from fsdp_ckpt.ranks.process_groups import process_group

    is_first = os.environ.get("RANK") == "0"
    try:
        with process_group("gloo"):
            report = consolidate_on_ranks(arguments.checkpoint, arguments.out, **options)
    except CheckpointError:
        if is_first:
            raise
        return 1
    if is_first:
        _print(report, arguments)
    return 0


def _print(report: ConsolidateReport, arguments: argparse.Namespace) -> None:
    warn_of_skipped(report.skipped)
    for names, what in (
        (report.left_out, "left out: no tensor, or each rank's own"),
        (report.varying, "different on some ranks, the lowest rank's was written"),
    ):
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            warn(f"{', '.join(names[:SHOWN])}{more}: {what}")
    if arguments.json:
        print_json({**dataclasses.asdict(report), "dry_run": arguments.dry_run})
        return
    if arguments.dry_run:
        sizes = {name: bytes_text(num_bytes) for name, num_bytes in report.sizes.items()}
        rows = [(name, sizes[name], key) for name in report.files for key in report.keys[name]]
        print_table(("FILE", "SIZE", "KEY"), rows, right=(1,))
    would = "would write " if arguments.dry_run else ""
    print_line(
        f"{would}step {report.step} -> {report.output}: {report.num_tensors} tensors, "
        f"{bytes_text(report.total_bytes)}, in {len(report.files)} file(s)"
    )
