"""``fsdp-ckpt repair ROOT``: bring back checkpoints of which only the manifest is lost."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fsdp_ckpt.cli.arguments import add_json, add_root, no_checkpoint, positive
from fsdp_ckpt.cli.text import fail, print_json, print_line
from fsdp_ckpt.commit.catalog import list_steps, step_folder
from fsdp_ckpt.commit.publish import holds_checkpoint
from fsdp_ckpt.commit.repair import (
    RepairOptions,
    StepRepair,
    repair_folder,
    repair_root,
    repair_step,
)
from fsdp_ckpt.storage.open import open_store
from fsdp_ckpt.storage.store import Store

if TYPE_CHECKING:
    from fsdp_ckpt.cli.arguments import Commands

__all__ = ["add_parser", "run"]

_STATES = {
    "whole": "whole",
    "repaired": "REPAIRED",
    "repairable": "can be repaired",
    "beyond": "CANNOT BE REPAIRED",
}


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "repair",
        help="bring back checkpoints of which only the manifest is lost",
        description="Publish attempts that are complete but have no manifest, or a damaged one, from the "
        "headers of their shard files; say why not otherwise. What is whole is not touched. Exit code 0: all "
        "is whole now.",
    )
    add_root(parser)
    parser.add_argument("--step", type=int, metavar="N", help="only this step of the root")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done")
    parser.add_argument(
        "--fast", action="store_true", help="trust headers and sizes, do not read the data first"
    )
    parser.add_argument(
        "--threads", type=positive, default=2, metavar="N", help="reads in flight (2)"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Repair; return the exit code."""
    store = open_store(arguments.root)
    options = RepairOptions(
        dry_run=arguments.dry_run,
        reads_data=not arguments.fast,
        num_threads=arguments.threads,
    )
    found = _repair(store, arguments.step, options)
    if arguments.json:
        print_json({"root": store.url, "dry_run": options.dry_run, "steps": _plain(found)})
    else:
        _print_text(found)
    left = [item for item in found if item.state not in ("whole", "repaired")]
    if not left:
        return 0
    remedy = "repair without --dry-run" if options.dry_run else "restore another step"
    return fail(f"{store.url}: {len(left)} of {len(found)} step(s) not whole; {remedy}")


def _repair(store: Store, step: int | None, options: RepairOptions) -> list[StepRepair]:
    if step is not None:
        return [repair_step(store, step, options)]
    if list_steps(store):
        return list(repair_root(store, options))
    # Later jobs and branches are known by the root only.
    parent, _, name = store.url.rstrip("/").rpartition("/")
    if name.startswith("step-") and parent:
        root = open_store(parent)
        for own in list_steps(root):
            if step_folder(own) == name:
                return [repair_step(root, own, options)]
    if not holds_checkpoint(store) and not _has_shards(store):
        raise no_checkpoint(store)
    return [repair_folder(store, options)]


def _has_shards(store: Store) -> bool:
    return any(
        name.startswith("rank-") and name.endswith(".safetensors")
        for folder in store.list_folders()
        for name in store.child(folder).list_files()
    )


def _plain(found: Sequence[StepRepair]) -> list[dict[str, object]]:
    return [dataclasses.asdict(item) for item in found]


def _print_text(found: Sequence[StepRepair]) -> None:
    for item in found:
        what = item.url if item.step is None else f"step {item.step}"
        attempt = f", attempt {item.attempt}" if item.attempt is not None else ""
        print_line(f"{what}: {_STATES[item.state]}{attempt}")
        for reason in item.reasons:
            print_line(f"    {reason}")
    num = {state: sum(item.state == state for item in found) for state in _STATES}
    print_line(
        ", ".join(f"{count} {_STATES[state].lower()}" for state, count in num.items() if count)
    )
