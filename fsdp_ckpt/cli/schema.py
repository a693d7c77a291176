"""``fsdp-ckpt schema COMMAND``: what a command's ``--json`` prints, as JSON Schema."""

from __future__ import annotations

import argparse
import json
from importlib import resources
from typing import TYPE_CHECKING, Any

from fsdp_ckpt.cli.arguments import add_json
from fsdp_ckpt.errors import NotFoundError

if TYPE_CHECKING:
    from fsdp_ckpt.cli.arguments import Commands

__all__ = ["add_parser", "described_commands", "read_schema", "run"]

_FOLDER = resources.files("fsdp_ckpt.cli") / "schemas"


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "schema",
        help="print the JSON Schema of what a command's --json prints",
        description="Print the JSON Schema (draft 2020-12) of what another command's --json prints.",
    )
    parser.add_argument("command", metavar="COMMAND", help="the other command, such as ls")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the schema; return the exit code."""
    # JSON with --json and without: it has no other form.
    print(json.dumps(read_schema(arguments.command), indent=2))
    return 0


def described_commands() -> list[str]:
    """Return the commands that have a schema, sorted."""
    names = (file.name for file in _FOLDER.iterdir())
    return sorted(name.removesuffix(".json") for name in names if name.endswith(".json"))


def read_schema(command: str) -> dict[str, Any]:
    """Return a command's schema.

    Raises:
        NotFoundError: No command of this name prints JSON.
    """
    if command not in described_commands():
        raise NotFoundError(
            f"no schema of {command!r}; there are those of {', '.join(described_commands())}"
        )
    schema: dict[str, Any] = json.loads((_FOLDER / f"{command}.json").read_text("utf-8"))
    return schema
