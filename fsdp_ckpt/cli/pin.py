"""``fsdp-ckpt pin ROOT STEP``: keep a checkpoint whatever the policy."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fsdp_ckpt.cli.arguments import add_json, add_root
from fsdp_ckpt.cli.text import print_json, print_line
from fsdp_ckpt.commit.locate import locate_checkpoint
from fsdp_ckpt.commit.marks import pin, unpin
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
    add_root(parser)
    parser.add_argument("step", type=int, metavar="STEP", help="of the checkpoint")
    parser.add_argument("--unpin", action="store_true", help="let it go again")
    parser.add_argument("--note", default="", metavar="TEXT", help="why, for whoever comes later")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Pin or unpin; return the exit code."""
    root, step = open_store(arguments.root), arguments.step
    locate_checkpoint(root, step)  # what is not there is an error that says what is
    has_changed = unpin(root, step) if arguments.unpin else pin(root, step, arguments.note)
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
        print_line(f"step {step}: {state}{'' if has_changed else ', as before'}")
    return 0
