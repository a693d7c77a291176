"""``fsdp-ckpt interval --cost 6s --mtbf 3h``: how often to save."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from fsdp_ckpt.cli.arguments import add_json, positive
from fsdp_ckpt.cli.durations import duration_text, parse_duration
from fsdp_ckpt.cli.text import print_json, print_line, print_table
from fsdp_ckpt.stability.interval import daly_interval, lost_fraction, young_interval

if TYPE_CHECKING:
    from fsdp_ckpt.cli.arguments import Commands

__all__ = ["add_parser", "run"]

INTERVALS = (1 / 4, 1 / 2, 1, 2, 4)
SIZES = (1 / 16, 1 / 4, 1, 4)


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "interval",
        help="tell how often to save",
        description="Tell the time between two saves that loses the least, from what a save costs and how "
        "often the job fails (Young 1974, Daly 2006), and what is lost with it and with others.",
    )
    parser.add_argument(
        "--cost",
        type=parse_duration,
        required=True,
        metavar="TIME",
        help="what one save takes from training: the stop, and what the steps beside the writing are "
        "slower; 6s, 250ms",
    )
    parser.add_argument(
        "--mtbf",
        type=parse_duration,
        required=True,
        metavar="TIME",
        help="mean time between failures of the whole job: 3h, 2d",
    )
    parser.add_argument(
        "--ranks",
        type=positive,
        metavar="N",
        help="ranks of the job that --mtbf is of: adds what is lost in hours of ranks, and jobs of other "
        "sizes on the same machines, whose failures are as many per rank",
    )
    parser.add_argument(
        "--per-rank",
        action="store_true",
        help="--mtbf is of one rank; the job's is that divided by --ranks",
    )
    parser.add_argument(
        "--recovery",
        type=parse_duration,
        default=0.0,
        metavar="TIME",
        help="from a failure to training again, and until a save in the background is durable (0)",
    )
    add_json(parser)
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Print interval, loss and table; return the exit code."""
    if arguments.per_rank and arguments.ranks is None:
        arguments.parser.error("--per-rank needs --ranks")
    mtbf_s = arguments.mtbf / (arguments.ranks if arguments.per_rank else 1)
    cost_s, recovery_s, ranks = arguments.cost, arguments.recovery, arguments.ranks
    best_s = daly_interval(cost_s, mtbf_s)
    document: dict[str, Any] = {
        "interval_s": best_s,
        "lost_fraction": lost_fraction(best_s, cost_s, mtbf_s, recovery_s),
        "young_interval_s": young_interval(cost_s, mtbf_s),
        "cost_s": cost_s,
        "mtbf_s": mtbf_s,
        "recovery_s": recovery_s,
        "ranks": ranks,
        "intervals": [_row(best_s * f, cost_s, mtbf_s, recovery_s, ranks) for f in INTERVALS],
        "sizes": [],
    }
    if ranks is not None:
        for size in sorted({max(round(ranks * factor), 1) for factor in SIZES}):
            its_mtbf_s = mtbf_s * ranks / size
            interval_s = daly_interval(cost_s, its_mtbf_s)
            row = _row(interval_s, cost_s, its_mtbf_s, recovery_s, size)
            document["sizes"].append({"ranks": size, "mtbf_s": its_mtbf_s, **row})
    if arguments.json:
        print_json(document)
    else:
        _print_text(document)
    return 0


def _row(
    interval_s: float, cost_s: float, mtbf_s: float, recovery_s: float, ranks: int | None
) -> dict[str, Any]:
    lost = lost_fraction(interval_s, cost_s, mtbf_s, recovery_s)
    rank_hours = None if ranks is None else lost * 24 * ranks
    return {"interval_s": interval_s, "lost_fraction": lost, "lost_rank_hours_per_day": rank_hours}


def _print_text(document: dict[str, Any]) -> None:
    of = "" if document["ranks"] is None else f" on {document['ranks']} ranks"
    print_line(
        f"save every {duration_text(document['interval_s'])}: {document['lost_fraction']:.2%} of the time is "
        f"lost{of}, at {duration_text(document['cost_s'])} per save and a failure every "
        f"{duration_text(document['mtbf_s'])}"
    )
    print_line()
    print_table(
        ("INTERVAL", "LOST", "RANK-HOURS A DAY"),
        [(duration_text(row["interval_s"]), *_lost(row)) for row in document["intervals"]],
        right=(0, 1, 2),
    )
    if document["sizes"]:
        print_line()
        print_table(
            ("RANKS", "FAILURE EVERY", "INTERVAL", "LOST", "RANK-HOURS A DAY"),
            [
                (
                    row["ranks"],
                    duration_text(row["mtbf_s"]),
                    duration_text(row["interval_s"]),
                    *_lost(row),
                )
                for row in document["sizes"]
            ],
            right=(0, 1, 2, 3, 4),
        )


def _lost(row: dict[str, Any]) -> tuple[str, str]:
    hours = row["lost_rank_hours_per_day"]
    return f"{row['lost_fraction']:.2%}", "–" if hours is None else f"{hours:,.1f}"
