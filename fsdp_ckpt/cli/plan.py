"""``fsdp-ckpt plan CHECKPOINT --world-size N``: will it load there, and what will it cost."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from typing import TYPE_CHECKING, Any

from fsdp_ckpt.cli.arguments import add_checkpoint, add_json, open_named, positive
from fsdp_ckpt.cli.text import bytes_text, fail, print_json, print_line, print_table
from fsdp_ckpt.compare.fit import Fit, fit
from fsdp_ckpt.compare.forecast import Forecast, forecast
from fsdp_ckpt.errors import MismatchError
from fsdp_ckpt.plan.targets import Kind, TargetLayout
from fsdp_ckpt.storage.open import open_store

if TYPE_CHECKING:
    from fsdp_ckpt.cli.arguments import Commands

__all__ = ["add_parser", "run"]

SHOWN_RANKS = 16
SHOWN_NAMES = 20
_HSDP = re.compile(r"hsdp:([1-9]\d{0,5})x([1-9]\d{0,5})", re.ASCII)
_PLAIN: dict[str, Kind] = {"saved": "saved", "fsdp": "fsdp", "flat": "flat", "ddp": "ddp"}


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "plan",
        help="say whether a checkpoint loads on other ranks, and what that costs",
        description="Say whether a checkpoint will load on N ranks, and what each of them will read, from "
        "its manifest and headers alone: without a GPU or a process group. Exit code 1: it will not.",
    )
    add_checkpoint(parser)
    parser.add_argument(
        "--world-size",
        type=positive,
        metavar="N",
        help="ranks that load; by default those that saved",
    )
    parser.add_argument(
        "--layout",
        type=_layout,
        default=("saved", None),
        metavar="LAYOUT",
        help="saved (default: as it was, on N ranks), fsdp (FSDP2 over all ranks), hsdp:RxS (R groups of S), "
        "flat (FSDP1) or ddp (every rank holds all)",
    )
    parser.add_argument(
        "--against",
        metavar="OTHER",
        help="a checkpoint of the model that is to be restored, or its Hugging Face folder: list names, "
        "shapes and dtypes that do not fit",
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Plan; return the exit code."""
    checkpoint = open_named(arguments)
    target = _target(arguments, checkpoint.manifest.world_size)
    found = forecast(checkpoint, target)
    fits = None if arguments.against is None else fit(checkpoint, open_store(arguments.against))
    loads = not found.problems and (fits is None or fits.is_exact)
    if arguments.json:
        print_json(_document(found, fits, loads))
    else:
        _print_text(found, fits, loads)
    if loads:
        return 0
    why = (
        found.problems[0] if found.problems else f"what {arguments.against} holds is another model"
    )
    return fail(
        f"{found.url}: does not load on {found.world_size} rank(s) as {found.layout}: {why}; the report "
        "names all that is in the way"
    )


def _layout(text: str) -> tuple[Kind, tuple[int, int] | None]:
    """Turn ``fsdp`` or ``hsdp:2x4`` into a kind and the shape of its mesh."""
    if (match := _HSDP.fullmatch(text)) is not None:
        return "hsdp", (int(match[1]), int(match[2]))
    if text in _PLAIN:
        return _PLAIN[text], None
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a layout; write saved, fsdp, hsdp:RxS, flat or ddp"
    )


def _target(arguments: argparse.Namespace, saved_world_size: int) -> TargetLayout:
    kind, shape = arguments.layout
    world_size = arguments.world_size or (math.prod(shape) if shape else saved_world_size)
    if shape is None:
        return TargetLayout(kind=kind, world_size=world_size)
    if math.prod(shape) != world_size:
        raise MismatchError(
            f"--layout hsdp:{shape[0]}x{shape[1]} is for {math.prod(shape)} ranks, --world-size says "
            f"{world_size}; make them the same"
        )
    return TargetLayout(kind=kind, world_size=world_size, num_groups=shape[0])


def _document(found: Forecast, fits: Fit | None, loads: bool) -> dict[str, Any]:
    return {
        **dataclasses.asdict(found),
        "loads": loads,
        "read_bytes": found.read_bytes,
        "imbalance": round(found.imbalance, 4),
        "against": None if fits is None else dataclasses.asdict(fits),
    }


def _print_text(found: Forecast, fits: Fit | None, loads: bool) -> None:
    print_line(
        f"{found.url}: step {found.step}, saved by {found.saved_world_size} rank(s), on "
        f"{found.world_size} rank(s) as {found.layout}"
    )
    print_line()
    _print_ranks(found)
    print_line()
    print_line(
        f"all ranks read {bytes_text(found.read_bytes)}; the one that reads the most, "
        f"{found.imbalance:.2f} x the mean"
    )
    print_line(f"random states: {found.random_states}")
    print_line(f"data cursor: {found.data_cursor}")
    for name in found.derived:
        print_line(f"differs between ranks, the lowest rank's is taken: {name}")
    if fits is not None:
        _print_fit(fits)
    for line in found.problems:
        print_line(f"in the way: {line}")
    print_line("loads" if loads else "DOES NOT LOAD")


def _print_ranks(found: Forecast) -> None:
    # Of thousands of ranks those that the others wait for are of interest.
    costs = sorted(found.ranks, key=lambda c: -c.read_bytes)[:SHOWN_RANKS]
    rows = [
        (
            cost.rank,
            bytes_text(cost.state_bytes),
            bytes_text(cost.read_bytes),
            bytes_text(cost.excess_bytes),
            cost.num_files,
            cost.num_ranges,
            cost.num_requests,
            bytes_text(cost.memory_bytes),
        )
        for cost in sorted(costs, key=lambda c: c.rank)
    ]
    head = ("RANK", "STATE", "READS", "EXCESS", "FILES", "RANGES", "REQUESTS", "MEMORY")
    print_table(head, rows, right=range(len(head)))
    if len(found.ranks) > len(rows):
        print_line(f"and {len(found.ranks) - len(rows)} ranks that read no more")


def _print_fit(fits: Fit) -> None:
    print_line(f"against {fits.against}: {fits.num_names} names in common")
    for title, names in (
        ("missing in the checkpoint", fits.missing),
        ("in the checkpoint, not there", fits.unexpected),
    ):
        for name in names[:SHOWN_NAMES]:
            print_line(f"{title}: {name}")
        if len(names) > SHOWN_NAMES:
            print_line(f"{title}: and {len(names) - SHOWN_NAMES} more")
    for line in (*fits.shapes, *fits.dtypes, *fits.kinds):
        print_line(line)
