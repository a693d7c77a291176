"""``fsdp-ckpt ls ROOT``: which checkpoints a run has."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fsdp_ckpt.cli.arguments import add_json, add_root, no_checkpoint, positive
from fsdp_ckpt.cli.text import age_text, bytes_text, fail, print_json, print_line, print_table
from fsdp_ckpt.commit.catalog import SkippedCheckpoint
from fsdp_ckpt.commit.survey import Survey, SurveyedCheckpoint, survey_root
from fsdp_ckpt.storage.open import open_store

if TYPE_CHECKING:
    from fsdp_ckpt.cli.arguments import Commands

__all__ = ["add_parser", "run"]

HEAD = ("STEP", "AGE", "SIZE", "RANKS", "LAYOUT", "HEALTH", "PINNED", "BRANCH", "ATTEMPT")
HEALTH_STYLES = {"good": "green", "damaged": "bold red", "being deleted": "dim"}
SKIPPED_STYLES = {"torn": "yellow", "damaged": "bold red", "newer": "bold red", "left": "dim"}


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "ls",
        help="list a run's checkpoints, newest first",
        description="List a run's checkpoints, newest first, and apart from them what is torn, damaged, or "
        "on a branch that the run left. Exit code 0: there is a whole one, and none is damaged. Compares "
        "file sizes; verify reads all.",
    )
    add_root(parser)
    parser.add_argument(
        "--limit", type=positive, metavar="N", help="look at the newest N steps; at all by default"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """List; return the exit code."""
    store = open_store(arguments.root)
    survey = survey_root(store, arguments.limit)
    if not survey.checkpoints and not survey.skipped:
        raise no_checkpoint(store)
    if arguments.json:
        print_json(
            {
                "root": store.url,
                "checkpoints": [_to_json(found) for found in survey.checkpoints],
                "skipped": [
                    {**dataclasses.asdict(found), "kind": _kind(found)} for found in survey.skipped
                ],
                "num_older": survey.num_older,
            }
        )
    else:
        _print_text(survey)
    return _judge(survey, store.url)


def _judge(survey: Survey, url: str) -> int:
    """Return the exit code; say why it is not 0."""
    usable = [f for f in survey.checkpoints if _health(f) not in ("damaged", "being deleted")]
    bad = [f.info.step for f in survey.checkpoints if _health(f) == "damaged"]
    bad += [f.step for f in survey.skipped if not (f.torn or f.abandoned)]
    if bad:
        return fail(
            f"{url}: {len(bad)} checkpoint(s) cannot be used, the newest of step {max(bad)}; "
            f"fsdp-ckpt verify {url} --step {max(bad)} says more, and a restore takes an older one"
        )
    if not usable:
        return fail(
            f"{url}: no whole checkpoint among {len(survey.skipped)} step(s); name another root, or start "
            "the run anew"
        )
    return 0


def _to_json(found: SurveyedCheckpoint) -> dict[str, Any]:
    return {
        **dataclasses.asdict(found.info),
        "layout": found.layout,
        "health": _health(found),
        "pinned": "pinned" in found.marks,
        "marks": sorted(found.marks),
    }


def _health(found: SurveyedCheckpoint) -> str:
    """Return what is known: a later save or a restore has said so, or nobody has judged it yet."""
    if "pruned" in found.marks:
        return "being deleted"
    if "corrupt" in found.marks:
        return "damaged"
    return "good" if "good" in found.marks else "candidate"


def _print_text(survey: Survey) -> None:
    if survey.checkpoints:
        rows = [_row(found) for found in survey.checkpoints]
        print_table(HEAD, rows, right=(0, 1, 2, 3, 7), styles={5: HEALTH_STYLES})
    if survey.skipped:
        if survey.checkpoints:
            print_line()
        passed = [(f.step, _kind(f), f.reason) for f in survey.skipped]
        print_table(("STEP", "SKIPPED", "REASON"), passed, right=(0,), styles={1: SKIPPED_STYLES})
    if survey.num_older:
        print_line()
        print_line(f"{survey.num_older} older step(s) not looked at", "dim")


def _row(found: SurveyedCheckpoint) -> Sequence[object]:
    info = found.info
    return (
        info.step,
        age_text(info.created),
        bytes_text(info.num_bytes),
        info.world_size,
        found.layout,
        _health(found),
        "yes" if "pinned" in found.marks else "no",
        info.generation,
        info.attempt,
    )


def _kind(skipped: SkippedCheckpoint) -> str:
    if skipped.torn:
        return "torn"
    if skipped.newer:
        return "newer"
    return "left" if skipped.abandoned else "damaged"
