"""Nested state and its leaves: nothing changes its place, its key's type or its container."""

from __future__ import annotations

import collections
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_ckpt.errors import CorruptCheckpointError, UnencodableStateError
from fsdp_ckpt.manifest.tree import (
    ListIndex,
    TupleIndex,
    flatten,
    path_from_json,
    path_name,
    path_to_json,
    unflatten,
)
from fsdp_ckpt.manifest.typed_json import MAX_DEPTH


class Target:
    """Stands for a tensor."""


def is_target(value: Any) -> bool:
    return isinstance(value, Target)


KEYS = st.one_of(st.text(alphabet="ab.1", max_size=3), st.integers(-2, 12))
LEAVES = st.one_of(st.builds(Target), st.none(), st.integers(), st.text(max_size=3), st.just(()))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(KEYS, inner, max_size=4),
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
    ),
    max_leaves=12,
)
STATES = st.dictionaries(KEYS, TREES, max_size=4)
PATHS = st.lists(
    st.one_of(
        st.text(),
        st.integers(),
        st.builds(ListIndex, st.integers(0)),
        st.builds(TupleIndex, st.integers(0)),
    ),
    min_size=1,
    max_size=8,
).map(tuple)


def typed(value: Any) -> Any:
    """Turn a nesting into something that is equal only where types and order are too."""
    if type(value) is dict:
        return "dict", [(type(k), k, typed(v)) for k, v in value.items()]
    if type(value) in (list, tuple):
        return type(value), [typed(v) for v in value]
    return type(value), id(value) if is_target(value) else value


def typed_path(path: Any) -> list[tuple[type, Any]]:
    return [(type(part), part) for part in path]


def leaf_names(value: Any, prefix: str) -> Iterator[str]:
    """Yield the name of every leaf: what each level of what is taken apart is called."""
    if type(value) is dict and value:
        for key, child in value.items():
            yield from leaf_names(child, f"{prefix}.{key}")
    elif (type(value) is list and holds(value, lambda v: is_target(v) or isinstance(v, dict))) or (
        type(value) is tuple and holds(value, is_target)
    ):
        for i, child in enumerate(value):
            yield from leaf_names(child, f"{prefix}.{i}")
    else:
        yield prefix[1:]


def holds(value: Any, wanted: Callable[[Any], bool]) -> bool:
    children = value.values() if isinstance(value, dict) else value
    return wanted(value) or (
        isinstance(value, dict | list | tuple) and any(holds(child, wanted) for child in children)
    )


@settings(deadline=None)
@given(STATES)
def test_state_comes_back_from_its_leaves(state: dict[Any, Any]) -> None:
    """Taken apart and put together, state is what it was; only leaves of equal names stand in the way."""
    names = [name for key, value in state.items() for name in leaf_names(value, f".{key}")]
    if len(set(names)) < len(names):
        with pytest.raises(UnencodableStateError, match="have this name") as caught:
            flatten(state, is_target)
        assert names.count(str(caught.value.key)) > 1
        return
    leaves = flatten(state, is_target)
    assert [path_name(path) for path in leaves] == names
    assert typed(unflatten(leaves.items())) == typed(state)


@settings(deadline=None)
@given(STATES)
def test_leaves_come_back_in_any_order(state: dict[Any, Any]) -> None:
    """The order of the leaves decides the order of keys, never what is there."""
    try:
        leaves = flatten(state, is_target)
    except UnencodableStateError:
        return
    assert unflatten(reversed(leaves.items())) == unflatten(leaves.items())


def test_leaves_are_named_by_their_path() -> None:
    """Dicts are taken apart, lists and tuples where they hold a target; everything else stays whole."""
    a, b = Target(), Target()
    ordered = collections.OrderedDict(x=1)
    state = {
        "model": {"w": a, 7: {"": [1, (b,)]}},
        "betas": (0.9, 0.95),
        "empty": {},
        "nested": {"empty": {}},
        "ordered": ordered,
        "pairs": {("a", 1): 2},
    }
    leaves = flatten(state, is_target)
    assert {path_name(path): leaf for path, leaf in leaves.items()} == {
        "model.w": a,
        "model.7..0": 1,
        "model.7..1.0": b,
        "betas": (0.9, 0.95),
        "empty": {},
        "nested.empty": {},
        "ordered": ordered,
        "pairs": {("a", 1): 2},
    }
    assert leaves["ordered",] is ordered
    assert ("model", 7, "", ListIndex(1), TupleIndex(0)) in leaves


def test_mappings_that_hold_a_target_are_taken_apart() -> None:
    """An ordered dict, as ``Module.state_dict`` gives, is a dict of its leaves."""
    a = Target()
    state = collections.OrderedDict(model=collections.OrderedDict(w=a, step=3))
    assert flatten(state, is_target) == {("model", "w"): a, ("model", "step"): 3}


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict, collections.Counter])
def test_a_root_without_targets_keeps_its_values(kind: Callable[..., Any]) -> None:
    """Whatever mapping the state is, none of its values is passed over."""
    assert flatten(kind(step=3, epoch=1), is_target) == {("step",): 3, ("epoch",): 1}
    assert flatten(kind(), is_target) == {}


@pytest.mark.parametrize("key", [("a", 1), None, 1.5, True, b"x"])
def test_keys_that_no_path_can_hold_are_refused(key: Any) -> None:
    """Neither the state itself nor a dict above a target may have keys but strings and integers."""
    for state in ({key: 1}, {key: Target()}, {"opt": {key: Target()}}, {"opt": {key: [Target()]}}):
        with pytest.raises(UnencodableStateError, match="must be a str or an int") as caught:
            flatten(state, is_target)
        assert repr(key) in str(caught.value)
    assert flatten({"opt": {key: 1}}, is_target) == {("opt",): {key: 1}}


@pytest.mark.parametrize(
    ("state", "name"),
    [
        ({"a": {"b": 1}, "a.b": 2}, "a.b"),
        ({1: 1, "1": 2}, "1"),
        ({"a": [Target()], "a.0": 2}, "a.0"),
        ({"": {"": 1}, ".": 2}, "."),
    ],
)
def test_leaves_of_equal_names_are_refused(state: dict[Any, Any], name: str) -> None:
    """Names tell leaves apart on storage, so no two may meet; the error shows both paths."""
    with pytest.raises(UnencodableStateError, match="two entries") as caught:
        flatten(state, is_target)
    assert caught.value.key == name


def nest(levels: int, leaf: Any, wrap: Callable[[Any], Any]) -> Any:
    for _ in range(levels):
        leaf = wrap(leaf)
    return leaf


@pytest.mark.parametrize("wrap", [lambda v: {"k": v}, lambda v: [v], lambda v: (v,)])
def test_depth_has_a_limit(wrap: Callable[[Any], Any]) -> None:
    """Nesting up to the limit comes back; one level more is refused, as is a container in itself."""
    deep = {"k": nest(MAX_DEPTH - 1, Target(), wrap)}
    assert typed(unflatten(flatten(deep, is_target).items())) == typed(deep)
    with pytest.raises(UnencodableStateError, match="nested deeper"):
        flatten({"k": nest(MAX_DEPTH, Target(), wrap)}, is_target)


def test_containers_that_hold_themselves_are_refused() -> None:
    """A cycle with a target or a dict on it is refused; one of lists is a leaf, for the encoder to refuse."""
    cycle: dict[str, Any] = {"w": Target()}
    cycle["self"] = [cycle, cycle]
    with pytest.raises(UnencodableStateError, match="containing itself"):
        flatten(cycle, is_target)
    loop: list[Any] = []
    loop += [loop, loop]
    assert flatten({"loop": loop}, is_target) == {("loop",): loop}
    values: dict[str, Any] = {}
    values["twice"] = [values, values]
    with pytest.raises(UnencodableStateError, match="containing itself"):
        flatten(values, is_target)


@pytest.mark.parametrize(
    "paths",
    [
        [("a",), ("a",)],
        [("a",), ("a", "b")],
        [("a", "b"), ("a",)],
        [("a", ListIndex(1))],
        [("a", ListIndex(0)), ("a", ListIndex(2))],
        [("a", ListIndex(0)), ("a", TupleIndex(1))],
        [("a", 0), ("a", ListIndex(1))],
        [("a", ListIndex(0)), ("a", "b")],
        [(ListIndex(0),)],
        [("a", TupleIndex(0), "b"), ("a", TupleIndex(0))],
    ],
)
def test_paths_that_contradict_each_other_are_damage(paths: list[tuple[Any, ...]]) -> None:
    """No two leaves in one place, nothing below a value, no list with holes, no container of two kinds."""
    for leaf in (1, None, {}):
        with pytest.raises(CorruptCheckpointError):
            unflatten((path, leaf) for path in paths)


def test_an_empty_dict_as_a_leaf_stays_apart() -> None:
    """A leaf that is a dict is a value: nothing is put into it."""
    empty: dict[str, Any] = {}
    with pytest.raises(CorruptCheckpointError, match="below a value"):
        unflatten([(("a",), empty), (("a", "b"), 1)])
    assert empty == {}


@settings(deadline=None)
@given(PATHS)
def test_paths_survive_json(path: tuple[Any, ...]) -> None:
    """A path comes back with the type of every part."""
    back = path_from_json(json.loads(json.dumps(path_to_json(path))))
    assert typed_path(back) == typed_path(path)


JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from(["tuple", "a"])
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner)
    ),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.one_of(JSON, st.lists(JSON)))
def test_what_is_no_path_is_damage(encoded: Any) -> None:
    """Any JSON is a path, or refused as damage; what is a path has only parts of the four kinds."""
    try:
        path = path_from_json(encoded)
    except CorruptCheckpointError:
        return
    assert path
    assert {type(part) for part in path} <= {str, int, ListIndex, TupleIndex}


@pytest.mark.parametrize(
    "encoded",
    [[], "a", None, {}, [None], [True], [1.5], [[]], [[-1]], [[0, "list"]], [["a"]], [[0, "tuple", 1]],
     ["k"] * (MAX_DEPTH + 2), [[True]]],
)  # fmt: skip
def test_malformed_paths_are_refused(encoded: Any) -> None:
    """Parts of other types, negative positions, no parts, and too many of them."""
    with pytest.raises(CorruptCheckpointError, match="not a path"):
        path_from_json(encoded)
