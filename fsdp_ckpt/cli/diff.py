"""``fsdp-ckpt diff A B``: what is not the same in two checkpoints, or one and a model's files."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, get_args

from fsdp_ckpt.cli.arguments import add_json, add_patterns, positive
from fsdp_ckpt.cli.progress import ProgressLine
from fsdp_ckpt.cli.text import bytes_text, print_json, print_line, print_table
from fsdp_ckpt.compare.diff import diff
from fsdp_ckpt.compare.difference import Difference, TensorDifference
from fsdp_ckpt.hf.selection import What
from fsdp_ckpt.storage.open import open_store

if TYPE_CHECKING:
    from fsdp_ckpt.cli.arguments import Commands

__all__ = ["add_parser", "run"]

VALUE_WIDTH = 40


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "diff",
        help="compare two checkpoints, or one with Hugging Face files",
        description="Compare names, shapes, dtypes, elements, values and what each rank has for itself, "
        "whatever the layouts. Exit code 0: nothing differs; 1: something does; 2: an error.",
    )
    for name in ("a", "b"):
        parser.add_argument(
            name,
            metavar=name.upper(),
            help="a run's root (its newest whole checkpoint is taken), a step's folder, or a folder of "
            "safetensors files; a path or URL",
        )
    parser.add_argument(
        "--what",
        choices=get_args(What),
        help="all (default of two checkpoints), the model (default where one side is a model's files), the "
        "optimizer's state, or the averaged model saved as extra['ema']",
    )
    add_patterns(parser)
    parser.add_argument(
        "--threads", type=positive, default=2, metavar="N", help="batches of 8 MiB in work (2)"
    )
    add_json(parser)
    # As diff and cmp have it: 1 says that the two differ.
    parser.set_defaults(run=run, error_code=2)


def run(arguments: argparse.Namespace) -> int:
    """Compare; return the exit code."""
    progress = ProgressLine()
    try:
        found = diff(
            open_store(arguments.a),
            open_store(arguments.b),
            what=arguments.what,
            include=arguments.include,
            exclude=arguments.exclude,
            num_threads=arguments.threads,
            watch=progress.show,
        )
    finally:
        progress.close()
    if arguments.json:
        print_json({**dataclasses.asdict(found), "is_empty": found.is_empty})
    else:
        _print_text(found)
    return 0 if found.is_empty else 1


def _print_text(found: Difference) -> None:
    for title, absent in (("ONLY IN A", found.only_in_a), ("ONLY IN B", found.only_in_b)):
        if absent:
            print_line(title)
            for item in absent:
                print_line(_label(item.name, item.rank))
            print_line()
    if found.tensors:
        head = ("TENSOR", "A", "B", "DIFFERING", "MAX ABS", "RMS")
        print_table(head, [_row(t) for t in found.tensors], right=(3, 4, 5))
        print_line()
    if found.values:
        rows = [(_label(v.name, v.rank), _cut(v.a), _cut(v.b)) for v in found.values]
        print_table(("VALUE", "A", "B"), rows)
        print_line()
    for line in found.not_compared:
        print_line(f"not compared: {line}")
    num_names = len(found.only_in_a) + len(found.only_in_b)
    outcome = "nothing differs"
    if not found.is_empty:
        outcome = f"{len(found.tensors)} tensor(s) and {len(found.values)} value(s) differ"
        outcome += f", {num_names} name(s) on one side only" if num_names else ""
    print_line(
        f"{found.a} and {found.b}: {found.num_tensors} tensors, {bytes_text(found.num_bytes)}, and "
        f"{found.num_values} values compared: {outcome}"
    )


def _label(name: str, rank: int | None) -> str:
    return name if rank is None else f"{name} (rank {rank})"


def _cut(text: str) -> str:
    return text if len(text) <= VALUE_WIDTH else f"{text[: VALUE_WIDTH - 3]}..."


def _row(found: TensorDifference) -> Sequence[object]:
    a, b = (
        f"{dtype} {list(shape)}"
        for dtype, shape in ((found.dtype_a, found.shape_a), (found.dtype_b, found.shape_b))
    )
    if found.shape_a != found.shape_b:
        return _label(found.name, found.rank), a, b, "shape", "", ""
    count = f"{found.num_differing} of {found.num_elements}"
    if found.num_non_finite:
        count += f", {found.num_non_finite} not finite"
    numbers = [("?" if n is None else f"{n:.3g}") for n in (found.max_abs, found.rms)]
    return _label(found.name, found.rank), a, b, count, *numbers
