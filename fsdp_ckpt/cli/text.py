"""Values as a reader at a terminal wants them."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from typing import Any

__all__ = ["age_text", "bytes_text", "print_json", "print_table"]

_AGES = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))


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


def print_table(
    head: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[int] = ()
) -> None:
    """Print aligned columns; those at the positions ``right`` to the right."""
    cells = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    for row in cells:
        aligned = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(aligned).rstrip())


def print_json(document: Any) -> None:
    """Print one JSON document."""
    print(json.dumps(document, indent=2))
