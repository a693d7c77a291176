"""The ``fsdp-ckpt`` command: one module per subcommand, each with ``add_parser`` and ``run``.

Results go to stdout, as text or as one JSON document; everything else goes to stderr. The exit code is 0 only
when all is well, 1 on an error or damage, 2 on wrong usage. Nothing here loads torch.
"""

from __future__ import annotations

import argparse
import os
import sys

from fsdp_ckpt.cli import (
    consolidate,
    import_deepspeed,
    import_hf,
    interval,
    ls,
    pin,
    prune,
    reshard,
    show,
    verify,
)
from fsdp_ckpt.errors import CheckpointError
from fsdp_ckpt.version import __version__

__all__ = ["main"]

COMMANDS = (
    ls,
    show,
    verify,
    consolidate,
    import_hf,
    import_deepspeed,
    reshard,
    prune,
    pin,
    interval,
)


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments without the program's name; those of the process by default.

    Returns:
        The exit code. Wrong usage and ``--help`` end in ``SystemExit``, as argparse does it.
    """
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except CheckpointError as e:
        print(f"fsdp-ckpt: error: {e}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader (``head``) has enough. Python flushes stdout again at exit, which must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("fsdp-ckpt: error: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fsdp-ckpt", description="Look at, check and convert the checkpoints of fsdp_ckpt."
    )
    parser.add_argument("--version", action="version", version=f"fsdp-ckpt {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    return parser
