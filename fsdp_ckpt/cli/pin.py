"""``fsdp-ckpt pin ROOT STEP``: keep a checkpoint whatever the policy."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fsdp_ckpt.cli.arguments import add_json
from fsdp_ckpt.cli.text import print_json
from fsdp_ckpt.commit.catalog import step_folder
from fsdp_ckpt.commit.marks import pin, read_marks, remove_mark
from fsdp_ckpt.commit.publish import read_manifest
from fsdp_ckpt.storage.open import open_store

if TYPE_CHECKING:
    from fsdp_ckpt.cli.arguments import Commands

__all__ = ["add_parser", "run"]


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "pin",
        help="keep a checkpoint for ever, or no longer",
        description="Keep the checkpoint of a step whatever a job or prune would delete, until it is "
        "unpinned.",
    )
    parser.add_argument("root", metavar="ROOT", help="a path, or a URL such as s3://bucket/run")
    parser.add_argument("step", type=int, metavar="STEP", help="of the checkpoint")
    parser.add_argument("--unpin", action="store_true", help="let it go again")
    parser.add_argument("--note", default="", metavar="TEXT", help="why, for whoever comes later")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Pin or unpin; return the exit code."""
    root, step = open_store(arguments.root), arguments.step
    if arguments.unpin:
        store = root.child(step_folder(step))
        attempt = read_manifest(store).attempt
        has_changed = "pinned" in read_marks(store, attempt).kinds
        remove_mark(root, step, attempt, "pinned")
    else:
        has_changed = pin(root, step, arguments.note)
    if arguments.json:
        print_json(
            {
                "root": root.url,
                "step": step,
                "pinned": not arguments.unpin,
                "has_changed": has_changed,
            }
        )
    else:
        state = "not pinned" if arguments.unpin else "pinned"
        print(f"step {step}: {state}{'' if has_changed else ', as before'}")
    return 0
