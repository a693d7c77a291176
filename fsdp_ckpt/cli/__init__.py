"""The ``fsdp-ckpt`` command: one module per subcommand, each with ``add_parser`` and ``run``.

Results go to stdout, as text or as one JSON document; everything else goes to stderr. The exit code is 0 only
when all is well, 1 on an error or damage, which one line on stderr names, and 2 on wrong usage; of `diff`, 1
is an answer and errors are 2. It is 130 after Ctrl-C and 141 where the reader of a pipe has gone, as shells
expect. Nothing here loads torch.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import traceback

from fsdp_ckpt.cli import (
    consolidate,
    diff,
    import_deepspeed,
    import_hf,
    interval,
    ls,
    pin,
    plan,
    prune,
    repair,
    report,
    reshard,
    schema,
    show,
    verify,
)
from fsdp_ckpt.cli.text import fail
from fsdp_ckpt.errors import CheckpointError, describe
from fsdp_ckpt.version import __version__

__all__ = ["main"]

COMMANDS = (
    ls,
    show,
    verify,
    diff,
    plan,
    repair,
    consolidate,
    import_hf,
    import_deepspeed,
    reshard,
    prune,
    pin,
    interval,
    report,
    schema,
)
INTERRUPTED = 130
READER_GONE = 141


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments without the program's name; those of the process by default.

    Returns:
        The exit code. Wrong usage and ``--help`` end in ``SystemExit``, as argparse does it.
    """
    _escape_what_cannot_be_printed()
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader (``head``) has enough. Python flushes stdout again at exit, which must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as e:
        if arguments.debug:
            traceback.print_exc()
        remedy = f" (see {e.docs()})" if isinstance(e, CheckpointError) else "; --debug shows where"
        fail(describe(e) + remedy)
        return int(arguments.error_code)


def _escape_what_cannot_be_printed() -> None:
    """Let no name of a checkpoint end a command, whatever the terminal's encoding: it comes out escaped."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fsdp-ckpt", description="Look at, check and convert the checkpoints of fsdp_ckpt."
    )
    parser.add_argument("--version", action="version", version=f"fsdp-ckpt {__version__}")
    parser.set_defaults(debug=False, error_code=1)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    for of_command in (parser, *commands.choices.values()):
        of_command.add_argument(
            "--debug",
            action="store_true",
            default=argparse.SUPPRESS,  # the one before COMMAND must not be undone by the one after it
            help="show where an error comes from",
        )
    return parser
