"""Fields of JSON that was read from storage, each of the type that is due or refused."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_ckpt.errors import CorruptCheckpointError
from fsdp_ckpt.manifest.typed_json import Json

__all__ = ["count", "counts", "shown", "text"]


def count(value: Json) -> int:
    """Return ``value`` if it is an int in [0, 2**63).

    Raises:
        CorruptCheckpointError: It is not.
    """
    if type(value) is not int or not 0 <= value < 2**63:
        raise CorruptCheckpointError(f"{shown(value)} where a count is due")
    return value


def counts(values: Iterable[Json]) -> tuple[int, ...]:
    """Return ``values`` if each is an int in [0, 2**63); see :func:`count`."""
    return tuple(count(value) for value in values)


def text(value: Json) -> str:
    """Return ``value`` if it is a str.

    Raises:
        CorruptCheckpointError: It is not.
    """
    if type(value) is not str:
        raise CorruptCheckpointError(f"{shown(value)} where a text is due")
    return value


def shown(value: Json) -> str:
    """Return a value as it may stand in a message: a container may be nested too deep to be printed."""
    return f"a {type(value).__name__}" if isinstance(value, list | dict) else str(value)[:40]
