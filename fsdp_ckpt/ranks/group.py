"""What the ranks of a job tell each other: through the c10d store, never through collectives.

Invariant: every method is called by all ranks of the group in the same order, and all ranks leave it the
same way: with a result, or with an error that names the rank that failed. No call waits longer than the
group's deadline. Messages are JSON, never pickle.

The store answers from any thread and needs neither gloo nor NCCL, so background work cannot deadlock with
the training's own collectives.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from fsdp_ckpt.errors import (
    CheckpointError,
    IncompleteWriteError,
    RankFailureError,
    describe,
    error_from_json,
    error_to_json,
)
from fsdp_ckpt.ranks.connection import connect

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["RankGroup"]

T = TypeVar("T")

GRACE_S = 5.0
POLL_S = 0.002

# Groups are made in the same order on all ranks; their keys must not meet.
_numbers = itertools.count()


class RankGroup:
    """The ranks that take part in a checkpoint.

    Args:
        rank: This rank within the group.
        world_size: Number of ranks.
        store: Shared c10d store; needed where ``world_size`` > 1.
        timeout_s: Deadline of every exchange, in seconds.
        lingers: The coordinator waits a little until all ranks have read its answer, so that it may end the
            program, and with it the store that it may serve, right after.
        polls: Other threads use the same connection, so no call may keep it while it waits.
    """

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        store: Store | None = None,
        timeout_s: float = 600.0,
        *,
        lingers: bool = False,
        polls: bool = False,
    ) -> None:
        self._lingers = lingers
        self._polls = polls
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._store = store
        self._round = 0

    @classmethod
    def of(cls, timeout_s: float = 600.0, *, lingers: bool = False) -> RankGroup:
        """Return the group of all ranks of the job; called by all of them.

        Groups that linger are for background threads. Each kind has a connection of its own, where torch can
        make one, so that one thread's waiting does not hold up another's.
        Without an initialised process group, a group of one.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return cls(timeout_s=timeout_s)
        default, is_shared = connect(in_background=lingers)
        # One store may serve all lives of a job under torchrun; see process_groups.
        life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store: Store = dist.PrefixStore(  # type: ignore[attr-defined]  # torch lists no names
            f"fsdp_ckpt/{life}/{next(_numbers)}", default
        )
        return cls(
            dist.get_rank(),
            dist.get_world_size(),
            store,
            timeout_s,
            lingers=lingers,
            polls=is_shared,
        )

    @property
    def is_coordinator(self) -> bool:
        """Whether this is rank 0 of the group."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's ``value`` (JSON), in rank order, on all ranks."""
        return list(self._exchange(value, lambda values: values))

    def all_equal(self, value: Any) -> bool:
        """Whether every rank has the same ``value`` (JSON); the answer is the same on all ranks."""
        return bool(self._exchange(value, lambda values: all(v == values[0] for v in values)))

    def common(self, what: str, action: Callable[[], list[str]]) -> list[str]:
        """Run ``action`` on every rank; return the names that all of them return, in the coordinator's order.

        Args:
            what: What is being done, for the error.
            action: Local work; must not call this group.

        Raises:
            CheckpointError: As in :meth:`run`.
        """

        def intersect(lists: list[list[str]]) -> list[str]:
            everywhere = set(lists[0]).intersection(*lists[1:])
            return [name for name in lists[0] if name in everywhere]

        return list(self.decide(what, action, intersect))

    def run(self, what: str, action: Callable[[], T]) -> T:
        """Run ``action`` on every rank; return its result only if it succeeded on all.

        Args:
            what: What is being done, for the error.
            action: Local work; must not call this group.

        Raises:
            CheckpointError: The error of the lowest rank that failed, on every rank; a foreign error
                comes as :class:`RankFailureError`.
        """
        result, error = _outcome(action)
        errors = self._gather_errors(error)
        if errors:
            raise _agreed_error(what, errors, self.rank, error)
        return result  # type: ignore[return-value]  # None only where action returned None

    def decide(
        self,
        what: str,
        action: Callable[[], Any],
        combine: Callable[[list[Any]], Any],
        meanwhile: Callable[[Callable[[], bool]], None] | None = None,
    ) -> Any:
        """Run ``action`` on every rank, and let the coordinator make one answer of all results.

        Args:
            what: What is being done, for the error.
            action: Local work; returns JSON.
            combine: All ranks' results in rank order → JSON; only if all succeeded.
            meanwhile: What to do while the answer travels, where there is anyone to ask; is given a function
                that tells whether it is here. Must not call this group.

        Returns:
            What ``combine`` returned, on every rank.

        Raises:
            CheckpointError: As in :meth:`run`, or what ``combine`` raised, on every rank.
        """
        result, error = _outcome(action)

        def answer_of(outcomes: list[Any]) -> Any:
            failures = [[r, o["error"]] for r, o in enumerate(outcomes) if "error" in o]
            return {"failures": failures} if failures else combine([o["result"] for o in outcomes])

        vote = _outcome_to_json(result, error)
        if meanwhile is None or error is not None or self.world_size == 1:
            answer = self._exchange(vote, answer_of)
        else:
            with ThreadPoolExecutor(1, "fsdp_ckpt-vote") as thread:
                coming = thread.submit(self._exchange, vote, answer_of)
                meanwhile(coming.done)
                answer = coming.result()
        if isinstance(answer, dict) and "failures" in answer:
            errors: dict[int, Exception] = {r: error_from_json(e) for r, e in answer["failures"]}
            raise _agreed_error(what, errors, self.rank, error)
        return answer

    def commit(
        self, what: str, action: Callable[[], Any], finish: Callable[[list[Any]], Any]
    ) -> Any:
        """Run ``action`` on every rank, then ``finish`` on the coordinator, only if all succeeded.

        Args:
            what: What is being done, for the error.
            action: Local work; returns JSON.
            finish: All ranks' results in rank order → JSON.

        Returns:
            What ``finish`` returned, on every rank.

        Raises:
            IncompleteWriteError: On every rank, with all ranks' failures.
            CheckpointError: What ``finish`` raised, on every rank.
        """
        result, error = _outcome(action)

        def combine(outcomes: list[Any]) -> Any:
            failures = [[r, o["error"]] for r, o in enumerate(outcomes) if "error" in o]
            if failures:
                return {"failures": failures}
            finished, broken = _outcome(lambda: finish([o["result"] for o in outcomes]))
            return {"error": error_to_json(broken)} if broken else {"result": finished}

        answer = self._exchange(_outcome_to_json(result, error), combine)
        if "failures" in answer:
            errors = {r: error_from_json(e) for r, e in answer["failures"]}
            causes = "; ".join(f"rank {r}: {e}" for r, e in errors.items())
            raise IncompleteWriteError(
                f"{what} failed, nothing was committed: {causes}", rank=min(errors), failures=errors
            ) from error
        if "error" in answer:
            raise _agreed_error(what, {0: error_from_json(answer["error"])}, self.rank, None)
        return answer["result"]

    def coordinate(self, what: str, action: Callable[[], Any]) -> Any:
        """Run ``action`` on the coordinator; return its result (JSON) or raise its error on all ranks."""
        result, error = _outcome(action) if self.is_coordinator else (None, None)
        answer = self._exchange(_outcome_to_json(result, error), lambda outcomes: outcomes[0])
        if "error" in answer:
            raise _agreed_error(what, {0: error_from_json(answer["error"])}, self.rank, error)
        return answer["result"]

    def barrier(self) -> None:
        """Wait until all ranks have come here."""
        self.gather(None)

    def _gather_errors(self, error: Exception | None) -> dict[int, Exception]:
        record = None if error is None else error_to_json(error)
        # The coordinator answers with the failures alone: usually with nothing.
        failures = self._exchange(
            record, lambda records: [[r, e] for r, e in enumerate(records) if e is not None]
        )
        return {r: error_from_json(e) for r, e in failures}

    def _exchange(self, value: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """Send ``value`` to the coordinator, which combines all of them; return what it made.

        What goes wrong on the coordinator, a silent rank included, is the answer that all ranks raise.
        """
        store, number = self._store, self._round
        if self.world_size == 1:
            return combine([value])
        if store is None:
            raise AssertionError("a group of several ranks needs a store")
        self._round += 1
        deadline = time.monotonic() + self.timeout_s
        answer_key = f"{number}/answer"
        if not self.is_coordinator:
            store.set(f"{number}/{self.rank}", json.dumps(value))
            # The coordinator may answer at its own deadline that a rank is silent: a little later than ours.
            answer = json.loads(self._wait(answer_key, deadline + GRACE_S, 0, number))
            if self._lingers:
                store.add(f"{number}/readers", 1)
            if "error" in answer:
                raise error_from_json(answer["error"])
            return answer["result"]
        try:
            values = [value]
            for rank in range(1, self.world_size):
                values.append(json.loads(self._wait(f"{number}/{rank}", deadline, rank, number)))
                store.delete_key(f"{number}/{rank}")
            encoded = json.dumps({"result": combine(values)})
        except Exception as e:
            store.set(answer_key, json.dumps({"error": error_to_json(e)}))
            raise
        store.set(answer_key, encoded)
        if self._lingers:
            self._linger(number)
        if number >= 2:
            # All ranks have read the answer before last: they have sent a value since.
            store.delete_key(f"{number - 2}/answer")
            if self._lingers:
                store.delete_key(f"{number - 2}/readers")
        return json.loads(encoded)["result"]

    def _linger(self, number: int) -> None:
        """Wait until all ranks have read the answer; a rank that does not has only itself to lose."""
        if self._store is None:
            raise AssertionError("no store")
        deadline = time.monotonic() + GRACE_S
        pause_s = 0.001
        while self._store.add(f"{number}/readers", 0) < self.world_size - 1:
            if time.monotonic() > deadline:
                return
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.1)

    def _wait(self, key: str, deadline: float, rank: int, number: int) -> bytes:
        if self._store is None:
            raise AssertionError("no store")
        while self._polls and time.monotonic() < deadline and not self._store.check([key]):
            time.sleep(POLL_S)
        seconds = max(deadline - time.monotonic(), 0.001)
        try:
            self._store.wait([key], datetime.timedelta(seconds=seconds))
            return bytes(self._store.get(key))
        except RuntimeError as e:  # DistStoreError and gloo's timeouts are RuntimeErrors
            silent = self._silent_ranks(rank, number)
            error = RankFailureError(
                f"no answer within {self.timeout_s:g} s ({describe(e)})", rank=rank
            )
            raise RankFailureError(
                f"rank {', '.join(map(str, silent))} gave no answer within {self.timeout_s:g} s; it is "
                "dead, or slower than the deadline allows",
                rank=silent[0],
                failures=dict.fromkeys(silent, error),
            ) from e

    def _silent_ranks(self, first: int, number: int) -> list[int]:
        """Return the ranks from ``first`` on that the coordinator still waits for."""
        if not self.is_coordinator or self._store is None:
            return [first]
        try:
            later = [
                r
                for r in range(first + 1, self.world_size)
                if not self._store.check([f"{number}/{r}"])
            ]
        except RuntimeError:  # the store itself is gone
            later = []
        return [first, *later]


def _outcome(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return action(), None
    except Exception as e:  # every failure must reach the other ranks, or they would wait for it
        return None, e


def _outcome_to_json(result: Any, error: Exception | None) -> dict[str, Any]:
    return {"result": result} if error is None else {"error": error_to_json(error)}


def _agreed_error(
    what: str, errors: dict[int, Exception], rank: int, mine: Exception | None
) -> CheckpointError:
    """Return the error that every rank raises."""
    first = min(errors)
    error = errors[first]
    if type(error) is CheckpointError or not isinstance(error, CheckpointError):
        causes = "; ".join(f"rank {r}: {e}" for r, e in errors.items())
        agreed: CheckpointError = RankFailureError(
            f"{what} failed on {causes}", rank=first, failures=errors
        )
    else:
        agreed = error
        if agreed.rank is None:
            agreed.rank = first
    if mine is not None and mine is not agreed:
        agreed.__cause__ = mine
    return agreed
