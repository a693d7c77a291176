"""The structure of a nested state, so that the next one of the same structure is taken apart quickly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fsdp_ckpt.manifest.tree import Path, children_of

__all__ = ["Skeleton"]


class Skeleton:
    """The containers of a nested state, to take apart another one of the same structure in microseconds.

    Args:
        state: What :func:`flatten` has taken apart.
        is_target: As there.
    """

    def __init__(self, state: Mapping[Any, Any], is_target: Callable[[Any], bool]) -> None:
        self._is_target = is_target
        self._root = _Container.of(state, (), is_target, is_root=True)

    def leaves_of(self, state: Mapping[Any, Any]) -> list[Any] | None:
        """Return the leaves in :func:`flatten`'s order, or ``None`` if the structure is another one."""
        found: list[Any] = []
        if not self._root.collect(state, found):
            return None
        # What was a leaf may have become worth taking apart.
        kinds = {kind for kind in set(map(type, found)) if issubclass(kind, Mapping | list | tuple)}
        for leaf in found:
            if type(leaf) in kinds and children_of(leaf, (), self._is_target) is not None:
                return None
        return found


class _Container:
    """One container: its keys, and which of its children are containers."""

    __slots__ = ("inner", "is_mapping", "keys", "kind")

    def __init__(
        self, kind: type, keys: tuple[Any, ...], inner: list[tuple[int, _Container]]
    ) -> None:
        self.kind: Any = kind
        self.is_mapping = issubclass(kind, Mapping)
        self.keys, self.inner = keys, inner

    @classmethod
    def of(
        cls, value: Any, path: Path, is_target: Callable[[Any], bool], *, is_root: bool = False
    ) -> _Container:
        pairs = list(value.items() if is_root else children_of(value, path, is_target) or ())
        inner = [
            (i, cls.of(child, (*path, part), is_target))
            for i, (part, child) in enumerate(pairs)
            if children_of(child, (*path, part), is_target) is not None
        ]
        return cls(type(value), tuple(part for part, _ in pairs), inner)

    def collect(self, value: Any, found: list[Any]) -> bool:
        """Append the leaves below ``value``; return whether it has this node's structure."""
        if type(value) is not self.kind or len(value) != len(self.keys):
            return False
        if self.is_mapping and tuple(value) != self.keys:
            return False
        values = value.values() if self.is_mapping else value
        if not self.inner:
            found.extend(values)
            return True
        children = list(values)
        done = 0
        for position, node in self.inner:
            found.extend(children[done:position])
            if not node.collect(children[position], found):
                return False
            done = position + 1
        found.extend(children[done:])
        return True
