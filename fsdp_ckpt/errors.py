"""One error tree, sorted by what the caller can do about it.

Every error raised by this package is a :class:`CheckpointError`. Its first line says what happened,
where (step, rank, key or file), what was expected and found, and what to do; a traceback shows below it where
the documents go on. Foreign errors (``OSError``, botocore's, DCP's ``CheckpointException``) are mapped where
they enter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = [
    "AlreadyCommittedError",
    "CheckpointError",
    "ClosedError",
    "CorruptCheckpointError",
    "IncompleteWriteError",
    "MismatchError",
    "NotFoundError",
    "RankFailureError",
    "RunStoppedError",
    "StorageError",
    "UnencodableStateError",
    "UnsupportedFormatError",
    "describe",
    "error_from_json",
    "error_to_json",
]


class CheckpointError(Exception):
    """Base of every error of this package.

    Args:
        message: One line: what, where, expected and found, what to do.
        step: Training step of the checkpoint concerned, where known.
        attempt: Attempt id of the save concerned, where known.
        rank: Rank on which it happened, where known.
        key: Tensor, value or storage key concerned, where known.
    """

    def __init__(
        self,
        message: str,
        *,
        step: int | None = None,
        attempt: str | None = None,
        rank: int | None = None,
        key: str | None = None,
    ) -> None:
        # One line always: messages of foreign errors may hold newlines.
        super().__init__(" ".join(message.split()))
        self.step = step
        self.attempt = attempt
        self.rank = rank
        self.key = key
        self.add_note(f"docs: {self.docs()}")

    @classmethod
    def docs(cls) -> str:
        """Return where the documents tell of this error: a file of the repository, and an anchor in it."""
        # A subclass defined elsewhere is told of as the error of the tree that it is.
        kind = next(name for name in (c.__name__ for c in cls.__mro__) if name in __all__)
        return f"docs/troubleshooting.md#{kind.lower()}"

    def __reduce__(self) -> tuple[Any, ...]:
        return error_from_json, (error_to_json(self),)


class NotFoundError(CheckpointError, FileNotFoundError):
    """Nothing there: start fresh or name another checkpoint."""


class AlreadyCommittedError(CheckpointError, FileExistsError):
    """A checkpoint already exists under this name: someone else won, or the step was saved before."""


class CorruptCheckpointError(CheckpointError, ValueError):
    """The stored bytes are not what was written: fall back to an older checkpoint."""


class UnsupportedFormatError(CheckpointError):
    """Written by a newer format version: upgrade this package."""


class MismatchError(CheckpointError, ValueError):
    """Keys, shapes or dtypes differ from the live state: fix the model or allow the difference."""


class UnencodableStateError(CheckpointError, TypeError):
    """A value cannot be saved without running code on load: remove it or turn it into plain data."""


class StorageError(CheckpointError, OSError):
    """The store failed.

    Args:
        message: As in :class:`CheckpointError`.
        retryable: The same request may succeed later (throttling, a cut connection).
        **where: As in :class:`CheckpointError`.
    """

    def __init__(self, message: str, *, retryable: bool = False, **where: Any) -> None:
        super().__init__(message, **where)
        self.retryable = retryable


class _FailuresError(CheckpointError):
    """Carries what failed on which rank."""

    def __init__(
        self, message: str, *, failures: Mapping[int, Exception] | None = None, **where: Any
    ) -> None:
        super().__init__(message, **where)
        self.failures: dict[int, Exception] = dict(failures or {})


class IncompleteWriteError(_FailuresError):
    """A save failed and nothing was committed; ``failures`` maps each failed rank to its error."""


class RankFailureError(_FailuresError):
    """A rank failed or did not answer in time; ``failures`` maps each such rank to its error."""


class RunStoppedError(CheckpointError):
    """The run went wrong, and has gone back as often as it may: a person must look at it."""


class ClosedError(CheckpointError):
    """The manager was closed before this call."""


_TREE: dict[str, type[CheckpointError]] = {
    cls.__name__: cls
    for cls in (
        CheckpointError,
        NotFoundError,
        AlreadyCommittedError,
        CorruptCheckpointError,
        UnsupportedFormatError,
        MismatchError,
        UnencodableStateError,
        StorageError,
        IncompleteWriteError,
        RankFailureError,
        RunStoppedError,
        ClosedError,
    )
}


def describe(error: BaseException) -> str:
    """Return the first line of ``error``; the type is named where the error is not of our tree."""
    if isinstance(error, CheckpointError):
        return str(error)
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def error_to_json(error: BaseException) -> dict[str, Any]:
    """Turn an error into plain data, so that it can travel to other ranks without pickle.

    A foreign error becomes a :class:`CheckpointError` whose message names its type.
    """
    if not isinstance(error, CheckpointError):
        return {"type": "CheckpointError", "message": describe(error)}
    # A subclass defined elsewhere travels as the error of the tree that it is.
    kind = next(cls.__name__ for cls in type(error).__mro__ if cls in _TREE.values())
    record: dict[str, Any] = {"type": kind, "message": str(error)}
    for name in ("step", "attempt", "rank", "key"):
        if getattr(error, name) is not None:
            record[name] = getattr(error, name)
    if isinstance(error, StorageError):
        record["retryable"] = error.retryable
    if isinstance(error, _FailuresError):
        record["failures"] = [[r, error_to_json(e)] for r, e in error.failures.items()]
    return record


def error_from_json(record: Mapping[str, Any]) -> CheckpointError:
    """Rebuild the error that :func:`error_to_json` described."""
    fields = dict(record)
    cls = _TREE[fields.pop("type")]
    message = fields.pop("message")
    if "failures" in fields:
        fields["failures"] = {r: error_from_json(e) for r, e in fields["failures"]}
    return cls(message, **fields)
