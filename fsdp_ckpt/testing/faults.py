"""Faults at a store's operations, declared in the test.

    with FaultPlan(Fault("lose_answer", verbs=("create",))) as plan:
        CheckpointManager(FaultStore(store, plan), state).save()

Invariant: a declared fault fires as often as declared, or the plan's block raises: a test cannot pass
because its fault never happened.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Literal, NoReturn, Protocol, Self, TypeVar, get_args

from fsdp_ckpt.errors import StorageError

__all__ = [
    "MUTATING",
    "Fault",
    "FaultNotFiredError",
    "FaultPlan",
    "Kind",
    "Operation",
    "Verb",
    "require_fired",
]

T = TypeVar("T")

Kind = Literal["fail", "tear", "lose_answer", "delay", "crash", "crash_halfway", "crash_after"]
MutatingVerb = Literal["write", "write_at", "name", "flush", "commit", "abort", "create", "delete"]
ReadingVerb = Literal["read", "read_into", "size", "list_folders", "list_files"]
Verb = Literal[MutatingVerb, ReadingVerb]
# What changes a store; "write" opens a new object, without a key where "name" gives it one.
MUTATING: tuple[Verb, ...] = get_args(MutatingVerb)
HALVED = ("tear", "crash_halfway")


class DeclaredFault(Protocol):
    """A fault, of whatever kind of plan."""

    @property
    def count(self) -> int | None:
        """How often it must fire; ``None`` for at least once."""
        ...


class FaultNotFiredError(AssertionError):
    """A declared fault fired less often than declared: the test proved nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One call of a store.

    Args:
        verb: The method; ``write`` opens an object, ``write_at`` puts bytes into it.
        key: Relative to the root of the outermost fault store; empty for its own listing, and for what is
            done to an object that has no name yet.
    """

    verb: Verb
    key: str

    def __str__(self) -> str:
        return f"{self.verb} {self.key}"


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens at which operation.

    Args:
        kind: ``fail``: nothing is done and a StorageError raised. ``tear``: half of the bytes are written,
            then as ``fail``. ``lose_answer``: all is done, then as ``fail``. ``delay``: done later.
            ``crash``, ``crash_halfway``, ``crash_after``: this process is killed by SIGKILL before, halfway
            through or after the operation.
        nth: The first operation hit, counted from 1 among those that match ``verbs`` and ``key``.
        count: Operations hit, from there on without a gap; ``None`` for all of them, at least one.
        verbs: Operations that count; ``tear`` and ``crash_halfway`` know only ``write_at``.
        key: Pattern (``fnmatch``) of the keys that count.
        rank: The only rank that it happens on; ``None`` for each.
        delay_s: Of a ``delay``, in seconds.
        error: Raised instead of the StorageError.
        retryable: Of the StorageError.
    """

    kind: Kind
    nth: int = 1
    count: int | None = 1
    verbs: Sequence[Verb] = MUTATING
    key: str = "*"
    rank: int | None = None
    delay_s: float = 0.0
    error: BaseException | None = None
    retryable: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"no such kind of fault: {self.kind!r}")
        if unknown := set(self.verbs) - set(get_args(Verb)):
            raise ValueError(f"no such verbs of a store: {sorted(unknown)}")
        if self.kind in HALVED and tuple(self.verbs) != ("write_at",):
            raise ValueError(
                f"{self.kind}: only write_at has a half; pass verbs=('write_at',), not {self.verbs}"
            )
        if self.nth < 1 or (self.count is not None and self.count < 1):
            raise ValueError(f"nth and count start at 1; found {self.nth} and {self.count}")

    def matches(self, operation: Operation) -> bool:
        """Whether the operation counts."""
        return operation.verb in self.verbs and fnmatchcase(operation.key, self.key)

    def hits(self, number: int) -> bool:
        """Whether the ``number``-th operation that counts is hit, from 1."""
        return self.nth <= number and (self.count is None or number < self.nth + self.count)


class FaultPlan:
    """The faults of one test, and every operation that it has seen; any thread may use it.

    As a context manager it calls :meth:`check_fired` at the end of a block that does not raise.

    Args:
        *faults: Of those that hit one operation, all delays and the first other one take effect.
        rank: This process's; by default that of ``RANK`` in the environment, 0 without.
    """

    def __init__(self, *faults: Fault, rank: int | None = None) -> None:
        self.rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self.faults = tuple(fault for fault in faults if fault.rank in (None, self.rank))
        self._counts = [0] * len(self.faults)
        self._fired = [0] * len(self.faults)
        self._operations: list[Operation] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.check_fired()

    @property
    def operations(self) -> list[Operation]:
        """Every operation so far, in the order in which they began; those that were hit too."""
        with self._lock:
            return list(self._operations)

    def count(self, *verbs: Verb) -> int:
        """Return the number of operations so far; by default of the mutating ones."""
        return sum(operation.verb in (verbs or MUTATING) for operation in self.operations)

    def fired(self) -> int:
        """Return how often faults fired so far."""
        with self._lock:
            return sum(self._fired)

    def check_fired(self) -> None:
        """Check that every fault of this rank fired as often as declared.

        Raises:
            FaultNotFiredError: One did not.
        """
        with self._lock:
            require_fired(self.faults, self._fired, self._counts)

    def run(self, operation: Operation, act: Callable[[], T], act_half: Callable[[], object]) -> T:
        """Do one operation, with what is declared for it.

        Args:
            operation: Noted before anything happens.
            act: Does it.
            act_half: Does half of it.
        """
        due = self._note(operation)
        for fault in due:
            if fault.kind == "delay":
                time.sleep(fault.delay_s)
        struck = next((fault for fault in due if fault.kind != "delay"), None)
        if struck is None:
            return act()
        if struck.kind in HALVED:
            act_half()
        elif struck.kind in ("lose_answer", "crash_after"):
            act()
        if struck.kind.startswith("crash"):
            _die()
        raise struck.error or StorageError(
            f"{operation}: the declared fault {struck.kind}",
            retryable=struck.retryable,
            key=operation.key,
        )

    def _note(self, operation: Operation) -> list[Fault]:
        """Count an operation; return the faults that it is hit by."""
        due = []
        with self._lock:
            self._operations.append(operation)
            for i, fault in enumerate(self.faults):
                if not fault.matches(operation):
                    continue
                self._counts[i] += 1
                if fault.hits(self._counts[i]):
                    self._fired[i] += 1
                    due.append(fault)
        return due


def require_fired(
    faults: Sequence[DeclaredFault], fired: Sequence[int], matched: Sequence[int]
) -> None:
    """Check that each of ``faults`` fired as often as declared.

    Raises:
        FaultNotFiredError: One did not; with how often it fired and what else would have matched.
    """
    short = [
        f"{fault} fired {num_fired} times, {num_matched} matched"
        for fault, num_fired, num_matched in zip(faults, fired, matched, strict=True)
        if num_fired < (fault.count or 1)
    ]
    if short:
        raise FaultNotFiredError("; ".join(short))


def _die() -> NoReturn:
    """End this process as a crash does: no cleanup, no buffer flushed, on whichever thread."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("survived SIGKILL")
