"""The error tree: sorted by what the caller can do, one line each, and the same on every rank."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_ckpt import errors
from fsdp_ckpt.errors import (
    AlreadyCommittedError,
    CheckpointError,
    ClosedError,
    CorruptCheckpointError,
    IncompleteWriteError,
    MismatchError,
    NotFoundError,
    RankFailureError,
    RunStoppedError,
    StorageError,
    UnencodableStateError,
    UnsupportedFormatError,
    describe,
    error_from_json,
    error_to_json,
)

BUILT_IN_BASES: dict[type[CheckpointError], type[Exception]] = {
    CheckpointError: Exception,
    NotFoundError: FileNotFoundError,
    AlreadyCommittedError: FileExistsError,
    CorruptCheckpointError: ValueError,
    UnsupportedFormatError: Exception,
    MismatchError: ValueError,
    UnencodableStateError: TypeError,
    IncompleteWriteError: Exception,
    StorageError: OSError,
    RankFailureError: Exception,
    RunStoppedError: Exception,
    ClosedError: Exception,
}
CARRY_FAILURES = (IncompleteWriteError, RankFailureError)

PLACES = st.fixed_dictionaries(
    {},
    optional={
        "step": st.integers(),
        "attempt": st.text(),
        "rank": st.integers(0, 2**20),
        "key": st.text(),
    },
)


def make_error(
    kind: type[CheckpointError],
    message: str,
    place: dict[str, Any],
    retryable: bool,
    failures: dict[int, Exception],
) -> CheckpointError:
    """Build an error with all that its kind can carry."""
    if kind is StorageError:
        return StorageError(message, retryable=retryable, **place)
    if issubclass(kind, CARRY_FAILURES):
        return kind(message, failures=failures, **place)  # type: ignore[call-arg]  # both take it
    return kind(message, **place)


def errors_with(failures: st.SearchStrategy[dict[int, Exception]]) -> st.SearchStrategy[Any]:
    return st.builds(
        make_error,
        st.sampled_from(list(BUILT_IN_BASES)),
        st.text(),
        PLACES,
        st.booleans(),
        failures,
    )


ERRORS = st.recursive(
    errors_with(st.just({})),
    lambda inner: errors_with(st.dictionaries(st.integers(0, 2**20), inner, max_size=3)),
    max_leaves=5,
)


def facts_of(error: BaseException) -> Any:
    """All that an error says, as something that compares."""
    if not isinstance(error, CheckpointError):
        return describe(error)
    failures = getattr(error, "failures", None)
    return (
        type(error),
        str(error),
        (error.step, error.attempt, error.rank, error.key),
        getattr(error, "retryable", None),
        failures and {rank: facts_of(e) for rank, e in failures.items()},
    )


def test_the_tree_is_the_documented_one() -> None:
    """These errors exist and no others, each also the built-in error that callers know."""
    public = {name: getattr(errors, name) for name in errors.__all__}
    assert {c for c in public.values() if inspect.isclass(c)} == set(BUILT_IN_BASES)
    for kind, base in BUILT_IN_BASES.items():
        assert issubclass(kind, CheckpointError)
        assert issubclass(kind, base)
        assert isinstance(kind("x"), Exception)
    assert not issubclass(NotFoundError, StorageError)
    assert not issubclass(AlreadyCommittedError, StorageError)


def test_all_is_exact() -> None:
    """``__all__`` names every public thing that the module defines."""
    defined = {
        name
        for name, value in vars(errors).items()
        if getattr(value, "__module__", None) == errors.__name__ and not name.startswith("_")
    }
    assert sorted(defined) == errors.__all__


@settings(deadline=None)
@given(ERRORS)
def test_messages_are_one_line(error: CheckpointError) -> None:
    """Whatever a message is made of, it is one line without a ragged edge."""
    assert len(str(error).splitlines()) <= 1
    assert str(error) == str(error).strip()


@settings(deadline=None)
@given(ERRORS)
def test_errors_survive_pickle(error: CheckpointError) -> None:
    """An unpickled or copied error says the same."""
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert facts_of(pickle.loads(pickle.dumps(error, protocol))) == facts_of(error)
    assert facts_of(copy.copy(error)) == facts_of(error)


@settings(deadline=None)
@given(ERRORS)
def test_errors_survive_json(error: CheckpointError) -> None:
    """An error that travels to other ranks as JSON says the same there."""
    record = json.loads(json.dumps(error_to_json(error)))
    assert facts_of(error_from_json(record)) == facts_of(error)


def test_foreign_errors_travel_by_name() -> None:
    """A foreign error becomes the root of the tree; its type and first words stay in the message."""
    error = RankFailureError(
        "it failed", failures={3: ZeroDivisionError("by\nzero"), 5: KeyError()}
    )
    back = error_from_json(json.loads(json.dumps(error_to_json(error))))
    assert isinstance(back, RankFailureError)
    assert {rank: type(e) for rank, e in back.failures.items()} == dict.fromkeys(
        (3, 5), CheckpointError
    )
    assert [str(e) for e in back.failures.values()] == ["ZeroDivisionError: by zero", "KeyError"]


def test_a_subclass_from_elsewhere_travels_as_what_it_is() -> None:
    """Other ranks, which may not know a subclass, catch it as the error of the tree that it extends."""

    class ThrottledError(StorageError):
        pass

    error = ThrottledError("slow down", retryable=True, key="a/b", rank=2)
    back = error_from_json(error_to_json(error))
    assert type(back) is StorageError
    assert facts_of(back)[1:] == facts_of(error)[1:]


def test_describe_is_one_line() -> None:
    """Errors of the tree describe themselves, others with the name of their type."""
    assert describe(MismatchError("a\n  b")) == "a b"
    assert describe(ValueError("a\n  b")) == "ValueError: a b"
    assert describe(KeyboardInterrupt()) == "KeyboardInterrupt"
