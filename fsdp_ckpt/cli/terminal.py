"""What is different on a terminal: rich draws there.

Invariant: rich is loaded only where a terminal is, so that a command in a pipe starts without it and prints
the same plain lines everywhere.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["console_of", "draw_line", "draw_table", "is_terminal"]


def is_terminal(stream: TextIO | None = None) -> bool:
    """Whether people read ``stream``, stdout by default, on something that can draw."""
    return (stream or sys.stdout).isatty() and os.environ.get("TERM") != "dumb"


def console_of(stream: TextIO | None = None) -> Console:
    """Return what draws on ``stream``, stdout by default; ``NO_COLOR`` is obeyed."""
    from rich.console import Console

    # Names are names: nothing in them is markup, an emoji or something to highlight.
    return Console(
        file=stream or sys.stdout, force_terminal=True, markup=False, emoji=False, highlight=False
    )


def draw_line(text: str, style: str) -> None:
    """Draw one line of text on stdout; the terminal breaks it."""
    from rich.text import Text

    console_of().print(Text(text, style), soft_wrap=True)


def draw_table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[int],
    styles: Mapping[int, Mapping[str, str]],
) -> None:
    """Draw columns on stdout; what is too long for one is broken, and never cut.

    Args:
        head: Titles of the columns.
        rows: Cells.
        right: Positions of the columns that stand to the right.
        styles: Position of a column → a cell's text → its style.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for i, title in enumerate(head):
        table.add_column(title, justify="right" if i in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, styles.get(i, {}).get(cell, "")) for i, cell in enumerate(row)))
    console_of().print(table)
