"""Results as a reader at a terminal wants them, as plain lines in a pipe, or as one JSON document.

Invariant: nothing from a checkpoint reaches the terminal as a control character. Names come from files that
anyone may have written.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from fsdp_ckpt.cli.terminal import draw_line, draw_table, is_terminal

__all__ = [
    "SCHEMA_VERSION",
    "age_text",
    "bar_text",
    "bytes_text",
    "fail",
    "print_json",
    "print_line",
    "print_table",
    "printable",
    "warn",
]

SCHEMA_VERSION = 1
_AGES = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))
BAR_WIDTH = 24


def bytes_text(num_bytes: int) -> str:
    """Return ``4.2 GB``: three digits, powers of 1000."""
    if num_bytes < 1000:
        return f"{num_bytes} B"
    value = num_bytes / 1000
    for unit in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.0f} PB"


def age_text(created: str) -> str:
    """Return how long ago an ISO 8601 time was, in its largest unit (``3h``); ``?`` where it is not one."""
    try:
        age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(created)
    except (ValueError, TypeError):
        return "?"
    seconds = max(int(age.total_seconds()), 0)
    length, unit = next((a for a in _AGES if seconds >= a[0]), _AGES[-1])
    return f"{seconds // length}{unit}"


def bar_text(share: float) -> str:
    """Return a bar for a share of 0 to 1."""
    return ("█" if is_terminal() else "#") * round(BAR_WIDTH * min(max(share, 0.0), 1.0))


def printable(text: str) -> str:
    """Return ``text`` with what is no visible character or space written as its escape, such as ``\\n``."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def print_table(
    head: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    right: Sequence[int] = (),
    styles: Mapping[int, Mapping[str, str]] | None = None,
) -> None:
    """Print aligned columns.

    Args:
        head: Titles of the columns.
        rows: Cells.
        right: Positions of the columns that stand to the right.
        styles: Position of a column → a cell's text → its style on a terminal.
    """
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    if is_terminal():
        draw_table(head, cells, right, styles or {})
        return
    lines = [list(head), *cells]
    widths = [max(len(row[i]) for row in lines) for i in range(len(head))]
    for row in lines:
        aligned = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(aligned).rstrip())


def print_line(text: str = "", style: str = "") -> None:
    """Print one line; ``style`` is how it looks on a terminal."""
    if is_terminal():
        draw_line(printable(text), style)
    else:
        print(printable(text))


def print_json(document: Mapping[str, Any]) -> None:
    """Print one JSON document, as ``fsdp-ckpt schema`` describes it."""
    print(json.dumps({"schema_version": SCHEMA_VERSION, **document}, indent=2))


def warn(text: str) -> None:
    """Say on stderr, in one line, what the reader should know."""
    print(f"fsdp-ckpt: warning: {printable(text)}", file=sys.stderr)


def fail(text: str) -> int:
    """Say on stderr, in one line, what is wrong and what to do; return the exit code for it."""
    print(f"fsdp-ckpt: error: {printable(text)}", file=sys.stderr)
    return 1
