"""``fsdp-ckpt report ROOT``: what a run's saves and restores took, from its telemetry."""

from __future__ import annotations

import argparse
import dataclasses
import os
from typing import TYPE_CHECKING, Any

from fsdp_ckpt.cli.arguments import add_json, add_root
from fsdp_ckpt.cli.text import print_json, print_line, print_table
from fsdp_ckpt.report.digest import digest
from fsdp_ckpt.report.figures import figures_of, timelines_of
from fsdp_ckpt.report.page import WIDE, to_html
from fsdp_ckpt.report.png import to_png
from fsdp_ckpt.report.reading import read_telemetry
from fsdp_ckpt.report.run import Run
from fsdp_ckpt.report.summary import summary_of
from fsdp_ckpt.report.units import SECONDS
from fsdp_ckpt.storage.open import open_store

if TYPE_CHECKING:
    from fsdp_ckpt.cli.arguments import Commands

__all__ = ["add_parser", "run"]

NUM_SHOWN = 10


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "report",
        help="tell what a run's saves and restores took",
        description="Tell, from a run's telemetry, what its saves and restores took: per save and rank, with "
        "the rank that was late, what was lost to failures, and what lies on storage. As numbers here, as "
        "one HTML file that needs no network, and as PNGs.",
    )
    add_root(parser)
    parser.add_argument("--out", metavar="FILE", help="write the report as this HTML file")
    parser.add_argument("--png", metavar="DIR", help="write its pictures as PNGs into this folder")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Read, write what is asked for; return the exit code."""
    found = digest(read_telemetry(open_store(arguments.root)))
    written = []
    if arguments.out is not None:
        written.append(_put(arguments.out, to_html(found).encode()))
    if arguments.png is not None:
        for figure in (*figures_of(found), *timelines_of(found)):
            name = f"{arguments.png.rstrip('/')}/{figure.name}.png"
            written.append(_put(name, to_png(figure.draw(WIDE), figure.title, figure.caption)))
    if arguments.json:
        print_json(to_document(found, written))
    else:
        _print_text(found, written)
    return 0


def _put(url: str, content: bytes) -> str:
    """Write a file in place of the one that is there."""
    folder, slash, name = url.rpartition("/")
    store = open_store(f"{folder}{slash}" or os.curdir)
    store.delete(name)
    store.create(name, content)
    return url


def to_document(found: Run, written: list[str]) -> dict[str, Any]:
    """Return what ``--json`` prints; ``docs/telemetry.md`` describes it."""
    document = dataclasses.asdict(found)
    for save, row in zip(found.saves, document["saves"], strict=True):
        row |= {"total_s": save.total_s, "overlap": save.overlap}
    losses = found.losses
    document["losses"] |= {"lost_s": losses.lost_s, "lost_fraction": losses.lost_fraction}
    return {**document, "written": written}


def _print_text(found: Run, written: list[str]) -> None:
    for number in summary_of(found):
        print_line(f"{number.value:>12}  {number.name}")
    if found.saves:
        print_line()
        head = ("STEP", "OUTCOME", "STALL", "TOTAL", "LAST RANK")
        rows = []
        for save in reversed(found.saves[-NUM_SHOWN:]):
            late = save.straggler
            last = f"{late.rank}, +{SECONDS.text(late.behind_s)} in {late.phase}" if late else "-"
            times = (SECONDS.text(save.stall_s), SECONDS.text(save.total_s))
            rows.append((save.step, save.outcome, *times, last))
        print_table(head, rows, right=(0, 2, 3))
    for incident in found.incidents[-NUM_SHOWN:]:
        at = "" if incident.step is None else f" at step {incident.step}"
        print_line(f"{incident.kind}{at}: {incident.text}")
    for note in found.notes:
        print_line(f"note: {note}")
    for url in written:
        print_line(f"wrote {url}")
