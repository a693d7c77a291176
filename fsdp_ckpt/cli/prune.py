"""``fsdp-ckpt prune ROOT --last 3``: delete what a policy does not keep."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from fsdp_ckpt.cli.arguments import add_json, add_root, no_checkpoint, positive
from fsdp_ckpt.cli.durations import parse_duration
from fsdp_ckpt.cli.text import bytes_text, print_json, print_line, print_table
from fsdp_ckpt.commit.prune import prune
from fsdp_ckpt.commit.retention import PrunePlan, RetentionPolicy
from fsdp_ckpt.storage.open import open_store

if TYPE_CHECKING:
    from fsdp_ckpt.cli.arguments import Commands

__all__ = ["add_parser", "run"]


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "prune",
        help="delete the checkpoints that no rule keeps",
        description="Delete the checkpoints of a run that no rule keeps, what dead saves have left, and what "
        "the run has left behind by going back. The newest good checkpoint, pinned ones and damaged ones "
        "stay. A job may go on meanwhile.",
    )
    add_root(parser)
    parser.add_argument(
        "--last", type=positive, required=True, metavar="N", help="keep the newest N good ones"
    )
    parser.add_argument(
        "--every-steps", type=positive, metavar="N", help="keep those of every N-th step"
    )
    parser.add_argument("--epochs", action="store_true", help="keep the first one of each epoch")
    parser.add_argument(
        "--best", type=positive, default=0, metavar="N", help="keep the best N by --metric"
    )
    parser.add_argument("--metric", metavar="NAME", help="a score that was recorded with them")
    parser.add_argument("--highest", action="store_true", help="a higher score is better")
    parser.add_argument(
        "--grace",
        type=parse_duration,
        default=RetentionPolicy().grace_s,
        metavar="TIME",
        help="how old dead saves and abandoned checkpoints must be: 6h (default), 2d; more than a save takes",
    )
    parser.add_argument("--dry-run", action="store_true", help="say it, and delete nothing")
    add_json(parser)
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Prune; return the exit code."""
    if bool(arguments.best) != (arguments.metric is not None):
        arguments.parser.error("--best and --metric go together")
    policy = RetentionPolicy(
        last=arguments.last,
        every_steps=arguments.every_steps,
        epochs=arguments.epochs,
        best=arguments.best,
        metric=arguments.metric,
        highest=arguments.highest,
        grace_s=arguments.grace,
    )
    root = open_store(arguments.root)
    plan = prune(root, policy, dry_run=arguments.dry_run)
    if not (plan.keep or plan.delete or plan.left_alone):
        raise no_checkpoint(root)
    if arguments.json:
        print_json({"root": root.url, "dry_run": arguments.dry_run, **dataclasses.asdict(plan)})
    else:
        _print_text(plan, "would delete" if arguments.dry_run else "deleted")
    return 0


def _print_text(plan: PrunePlan, verb: str) -> None:
    rows = [(k.step, "keep", k.attempt, ", ".join(k.reasons)) for k in plan.keep]
    rows += [(d.step, f"{verb} {d.what}", d.attempt, d.reason) for d in plan.delete]
    rows += [(step, "left alone", "", "damaged, or newer") for step in plan.left_alone]
    if rows:
        print_table(("STEP", "WHAT", "ATTEMPT", "WHY"), rows, right=(0,))
        print_line()
    num_bytes = sum(d.num_bytes or 0 for d in plan.delete)
    print_line(
        f"{verb} {len(plan.delete)} of {len(rows)}, {bytes_text(num_bytes)} of checkpoints; "
        f"{len(plan.keep)} stay"
    )
