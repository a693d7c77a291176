"""Nested state ⇄ flat leaves, without losing a key's type or a container.

A *path* leads from the root to a leaf; its elements are dict keys (``str`` or ``int``) and positions in
lists and tuples. A leaf's *name* is its path joined by dots, which is also DCP's rule, so plain
``dcp.load`` finds the same names.

    {"a": {3: x}, "b": [t, t]}   ->   ("a", 3): x, ("b", ListIndex(0)): t, ("b", ListIndex(1)): t

Dicts are always taken apart; lists where they hold a dict, or something that :func:`flatten` is told to look
for (tensors); tuples where they hold the latter. Everything else is a leaf, empty containers included. So
names are those that DCP's own planners give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from fsdp_ckpt.errors import CorruptCheckpointError, UnencodableStateError
from fsdp_ckpt.manifest.fields import shown
from fsdp_ckpt.manifest.strict_json import refuse_colliding, refuse_depth
from fsdp_ckpt.manifest.typed_json import MAX_DEPTH, MAX_JSON_DEPTH, Json

__all__ = [
    "ListIndex",
    "Path",
    "TupleIndex",
    "children_of",
    "flatten",
    "path_from_json",
    "path_name",
    "path_to_json",
    "refuse_colliding_paths",
    "unflatten",
    "values_from_json",
]


class ListIndex(int):
    """Position in a list."""


class TupleIndex(int):
    """Position in a tuple."""


Path: TypeAlias = tuple[Any, ...]

# Of the ints up to here a few share a hash, of larger ones any number: see refuse_colliding.
MAX_PLAIN_INT = 2**63
MAX_LARGE_INTS = 1000
_ATOMS = frozenset({str, int, float, bool, type(None)})  # holds nothing, and is never looked for


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
        UnencodableStateError: Two leaves have the same name, a container contains itself, or a key of the
            state, or of a dict above something to look for, is neither ``str`` nor ``int``.
    """
    leaves: dict[Path, Any] = {}

    def visit(path: Path, value: Any) -> None:
        if len(path) > MAX_DEPTH:
            raise UnencodableStateError(
                f"{path_name(path[:3])}: nested deeper than {MAX_DEPTH} levels, or containing itself"
            )
        children = children_of(value, path, is_target)
        if children is None:
            leaves[path] = value
            return
        for part, child in children:
            visit((*path, part), child)

    # The root is taken apart whatever it holds: it has no path to be a leaf under.
    for part, child in state.items():
        if type(part) not in (str, int):
            raise UnencodableStateError(
                f"the key {part!r} of the state must be a str or an int", key=str(part)
            )
        visit((part,), child)
    _refuse_equal_names(leaves)
    return leaves


def children_of(
    value: Any, path: Path, is_target: Callable[[Any], bool]
) -> Iterable[tuple[Any, Any]] | None:
    """Return (path element, child) pairs, or ``None`` where ``value`` is a leaf."""
    if isinstance(value, Mapping) and value:
        bad = [key for key in value if type(key) not in (str, int)]
        if not bad and (type(value) is dict or _holds(value, is_target)):
            return value.items()
        if bad and _holds(value, is_target):
            raise UnencodableStateError(
                f"{path_name(path)}: the dict key {bad[0]!r} above a tensor must be a str or an int",
                key=path_name(path),
            )
    if type(value) is list and _holds(value, lambda v: is_target(v) or isinstance(v, Mapping)):
        return ((ListIndex(i), child) for i, child in enumerate(value))
    if type(value) is tuple and _holds(value, is_target):
        return ((TupleIndex(i), child) for i, child in enumerate(value))
    return None


def _holds(value: Any, is_target: Callable[[Any], bool], above: tuple[int, ...] = ()) -> bool:
    """Whether ``value`` is, or contains at any depth, something to look for."""
    if is_target(value):
        return True
    if (
        not isinstance(value, Mapping | list | tuple)
        or id(value) in above
        or len(above) > MAX_DEPTH
    ):
        return False  # a cycle, or a depth that flatten() or the encoder refuses by name
    children = value.values() if isinstance(value, Mapping) else value
    if _ATOMS.issuperset(map(type, children)):  # thousands of names
        return False
    return any(_holds(child, is_target, (*above, id(value))) for child in children)


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
    root = _Node(dict)
    for path, leaf in leaves:
        node: Any = root
        for part, following in zip(path, (*path[1:], None), strict=True):
            if node.kind is not _KINDS.get(type(part), dict):
                raise CorruptCheckpointError(f"{path_name(path)}: below two kinds of containers")
            if following is None:
                if part in node.children:
                    raise CorruptCheckpointError(f"{path_name(path)}: listed twice")
                node.children[part] = leaf
                break
            kind = _KINDS.get(type(following), dict)
            node = node.children.setdefault(part, _Node(kind))
            if type(node) is not _Node:
                raise CorruptCheckpointError(f"{path_name(path)}: below a value")
    built: dict[Any, Any] = root.build("")
    return built


class _Node:
    """A container whose children are still coming in."""

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.children: dict[Any, Any] = {}

    def build(self, name: Any) -> Any:
        built = {k: v.build(k) if type(v) is _Node else v for k, v in self.children.items()}
        if self.kind is dict:
            return built
        if sorted(built) != list(range(len(built))):
            raise CorruptCheckpointError(f"{name}: a {self.kind.__name__} with missing positions")
        return self.kind(built[i] for i in range(len(built)))


_KINDS: dict[type, type] = {ListIndex: list, TupleIndex: tuple}


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
        raise CorruptCheckpointError(f"not a path: {shown(encoded)}")
    parts: list[Any] = []
    for part in encoded:
        match part:
            case str() | int() if type(part) is not bool:
                parts.append(part)
            case [int(i)] if type(i) is int and i >= 0:
                parts.append(ListIndex(i))
            case [int(i), "tuple"] if type(i) is int and i >= 0:
                parts.append(TupleIndex(i))
            case _:
                raise CorruptCheckpointError(f"not a path: it has {shown(part)}")
    return tuple(parts)


def refuse_colliding_paths(paths: Sequence[Path]) -> None:
    """Refuse paths that were made to have one hash, as a whole or by their elements.

    Raises:
        CorruptCheckpointError: More of them than ever by chance.
    """
    refuse_colliding(paths)
    numbers = [part for path in paths for part in path if type(part) is not str]
    num_large = sum(not -MAX_PLAIN_INT < number < MAX_PLAIN_INT for number in numbers)
    if num_large > MAX_LARGE_INTS:
        raise CorruptCheckpointError(
            f"{num_large} numbers beyond 64 bits in paths, at most {MAX_LARGE_INTS} expected"
        )


def values_from_json(encoded: Json) -> dict[Path, Json]:
    """Return the values of a list of (path, typed JSON) pairs.

    Raises:
        CorruptCheckpointError: A path is none or listed twice, or a value is nested too deep.
    """
    pairs = [(path_from_json(path), value) for path, value in encoded]
    refuse_colliding_paths([path for path, _ in pairs])
    refuse_depth((value for _, value in pairs), MAX_JSON_DEPTH)
    values = dict(pairs)
    if len(values) != len(pairs):
        raise CorruptCheckpointError("two values have the same name")
    return values
