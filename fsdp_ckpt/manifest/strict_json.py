"""JSON that was read from storage, parsed strictly: it means one thing, or it is refused.

Invariant: what is parsed can be written again and walked through. No key stands twice in an object, no number
is NaN or infinite, and no number of keys was made to collide in a hash table.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Any, NoReturn

from fsdp_ckpt.errors import CorruptCheckpointError

__all__ = ["brief", "parse_json", "refuse_colliding", "refuse_depth"]

MAX_MESSAGE = 300
# Python hashes numbers, and tuples of them, without a secret: whoever writes a file can choose any number of
# them with one hash, and a table of n of those takes n * n / 2 comparisons. Real keys share one by twos.
MAX_COLLISIONS = 1000
_ATOMS = frozenset({str, int, float, bool, type(None)})


def parse_json(content: bytes | str) -> Any:
    """Parse a document.

    Raises:
        CorruptCheckpointError: Not JSON, ambiguous, or nested deeper than the interpreter can follow.
    """
    try:
        return json.loads(
            content,
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except CorruptCheckpointError:
        raise
    except (ValueError, RecursionError) as e:
        raise CorruptCheckpointError(f"not JSON ({brief(e)})") from e


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    built = dict(pairs)
    if len(built) != len(pairs):
        raise CorruptCheckpointError("a key stands twice in one JSON object")
    return built


def _refuse_constant(text: str) -> NoReturn:
    raise CorruptCheckpointError(f"{text} in JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise CorruptCheckpointError(f"{text[:40]} is beyond the numbers there are")
    return value


def refuse_depth(values: Iterable[Any], max_depth: int) -> None:
    """Refuse JSON values that are nested deeper than ``max_depth`` levels.

    Raises:
        CorruptCheckpointError: One is.
    """
    level = [value for value in values if type(value) in (dict, list)]
    for _ in range(max_depth):
        below: list[Any] = []
        for value in level:
            children = value.values() if type(value) is dict else value
            if not _ATOMS.issuperset(map(type, children)):  # thousands of names or numbers
                below.extend(child for child in children if type(child) in (dict, list))
        if not below:
            return
        level = below
    raise CorruptCheckpointError(f"values nested deeper than {max_depth} levels of JSON")


def refuse_colliding(keys: Iterable[Hashable]) -> None:
    """Refuse keys that were made to have one hash, before a table is built of them.

    Raises:
        CorruptCheckpointError: More of them than ever by chance.
    """
    hashes = [hash(key) for key in keys]
    if len(hashes) - len(set(hashes)) < MAX_COLLISIONS:  # as good as always
        return
    if max(Counter(hashes).values()) > MAX_COLLISIONS:
        raise CorruptCheckpointError("keys that were made to collide")


def brief(error: BaseException) -> str:
    """Return an error's message, cut: what was read may stand in it, in any length."""
    text = str(error)
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}..."
