"""Nested state ⇄ flat leaves, without losing a key's type or a container.

A *path* leads from the root to a leaf; its elements are dict keys (``str`` or ``int``) and positions in
lists and tuples. A leaf's *name* is its path joined by dots, which is also DCP's rule, so plain
``dcp.load`` finds the same names.

    {"a": {3: x}, "b": [t, t]}   ->   ("a", 3): x, ("b", ListIndex(0)): t, ("b", ListIndex(1)): t

Dicts are always taken apart; lists and tuples only where they hold something that :func:`flatten` is
told to look for (tensors). Everything else is a leaf, empty containers included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from fsdp_ckpt.errors import CorruptCheckpointError, UnencodableStateError
from fsdp_ckpt.manifest.typed_json import MAX_DEPTH, Json

__all__ = [
    "ListIndex",
    "Path",
    "TupleIndex",
    "flatten",
    "path_from_json",
    "path_name",
    "path_to_json",
    "unflatten",
]


class ListIndex(int):
    """Position in a list."""


class TupleIndex(int):
    """Position in a tuple."""


Path: TypeAlias = tuple[Any, ...]


def path_name(path: Path) -> str:
    """Return the leaf's name: the path joined by dots."""
    return ".".join([str(part) for part in path])


def flatten(state: Mapping[Any, Any], is_target: Callable[[Any], bool]) -> dict[Path, Any]:
    """Take nested state apart.

    Args:
        state: Nested dicts, lists and tuples.
        is_target: What makes a list or tuple worth taking apart (for instance, being a tensor).

    Returns:
        Path → leaf, in the order of ``state``.

    Raises:
        UnencodableStateError: Two leaves have the same name, a container contains itself, or a dict has
            a key that is neither ``str`` nor ``int`` above something to look for.
    """
    leaves: dict[Path, Any] = {}

    def visit(path: Path, value: Any) -> None:
        if len(path) > MAX_DEPTH:
            raise UnencodableStateError(
                f"{path_name(path[:3])}: nested deeper than {MAX_DEPTH} levels, or containing itself"
            )
        children = _children(value, path, is_target)
        if children is None:
            leaves[path] = value
            return
        for part, child in children:
            visit((*path, part), child)

    for part, child in _children(state, (), is_target) or ():
        visit((part,), child)
    _refuse_equal_names(leaves)
    return leaves


def _children(
    value: Any, path: Path, is_target: Callable[[Any], bool]
) -> Iterable[tuple[Any, Any]] | None:
    """Return (path element, child) pairs, or ``None`` where ``value`` is a leaf."""
    if isinstance(value, Mapping) and value:
        if all(type(k) in (str, int) for k in value) and (
            type(value) is dict or _holds(value, is_target, len(path))
        ):
            return value.items()
        if _holds(value, is_target, len(path)):
            bad = next(k for k in value if type(k) not in (str, int))
            raise UnencodableStateError(
                f"{path_name(path)}: the dict key {bad!r} above a tensor must be a str or an int",
                key=path_name(path),
            )
    if type(value) is list and _holds(value, is_target, len(path)):
        return ((ListIndex(i), child) for i, child in enumerate(value))
    if type(value) is tuple and _holds(value, is_target, len(path)):
        return ((TupleIndex(i), child) for i, child in enumerate(value))
    return None


def _holds(value: Any, is_target: Callable[[Any], bool], depth: int) -> bool:
    if is_target(value):
        return True
    if depth > MAX_DEPTH:
        return False  # flatten() refuses such a depth by name
    if isinstance(value, Mapping):
        return any(_holds(v, is_target, depth + 1) for v in value.values())
    return isinstance(value, list | tuple) and any(_holds(v, is_target, depth + 1) for v in value)


def _refuse_equal_names(leaves: Mapping[Path, Any]) -> None:
    by_name: dict[str, Path] = {}
    for path in leaves:
        name = path_name(path)
        other = by_name.setdefault(name, path)
        if other is not path:
            raise UnencodableStateError(
                f"{name}: two entries of the state have this name ({other!r} and {path!r}); rename one",
                key=name,
            )


def unflatten(leaves: Iterable[tuple[Path, Any]]) -> dict[Any, Any]:
    """Build the nested state back from its leaves.

    Raises:
        CorruptCheckpointError: The paths contradict each other.
    """
    root: dict[Any, Any] = {}
    sequences: list[tuple[Any, Any, dict[int, Any], type]] = []
    for path, leaf in leaves:
        node = root
        for part, following in zip(path, (*path[1:], None), strict=True):
            if following is None:
                if part in node:
                    raise CorruptCheckpointError(f"{path_name(path)}: listed twice")
                node[part] = leaf
                break
            kind = {ListIndex: list, TupleIndex: tuple}.get(type(following), dict)
            child = node.get(part)
            if child is None:
                child = node[part] = {}
                if kind is not dict:
                    sequences.append((node, part, child, kind))
            if not isinstance(child, dict):
                raise CorruptCheckpointError(f"{path_name(path)}: below a value")
            node = child
    # Innermost first, since an outer tuple can only be built from finished children.
    for node, part, child, kind in reversed(sequences):
        if sorted(child) != list(range(len(child))):
            raise CorruptCheckpointError(f"{part}: a {kind.__name__} with missing positions")
        node[part] = kind(child[i] for i in range(len(child)))
    return root


def path_to_json(path: Path) -> list[Json]:
    """Encode a path: a dict key is itself, a list position ``[i]``, a tuple position ``[i, "tuple"]``."""
    encoded: list[Json] = []
    for part in path:
        if type(part) is ListIndex:
            encoded.append([int(part)])
        elif type(part) is TupleIndex:
            encoded.append([int(part), "tuple"])
        else:
            encoded.append(part)
    return encoded


def path_from_json(encoded: Json) -> Path:
    """Decode what :func:`path_to_json` made.

    Raises:
        CorruptCheckpointError: Not a path.
    """
    if not isinstance(encoded, list) or not encoded or len(encoded) > MAX_DEPTH + 1:
        raise CorruptCheckpointError(f"not a path: {str(encoded)[:80]}")
    parts: list[Any] = []
    for part in encoded:
        match part:
            case str() | int() if type(part) is not bool:
                parts.append(part)
            case [int(i)] if i >= 0:
                parts.append(ListIndex(i))
            case [int(i), "tuple"] if i >= 0:
                parts.append(TupleIndex(i))
            case _:
                raise CorruptCheckpointError(f"not a path: {str(encoded)[:80]}")
    return tuple(parts)
