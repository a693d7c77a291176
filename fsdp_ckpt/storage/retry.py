"""Trying again what a store could not do just now.

Invariant: bounded in number and in time, and only what may pass by itself. What that is follows from status,
error code and type, never from a message.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from fsdp_ckpt.errors import StorageError

__all__ = ["Answer", "RetryPolicy", "answer_of", "is_transient"]

logger = logging.getLogger("fsdp_ckpt")

T = TypeVar("T")

# A 400 or 409 as a rule is final; these say that a body did not arrive whole or that rivals met.
_TRANSIENT_CODES = frozenset(
    {
        "BadDigest",
        "ConditionalRequestConflict",
        "IncompleteBody",
        "InternalError",
        "OperationAborted",
        "RequestTimeout",
        "RequestTimeoutException",
        "ServiceUnavailable",
        "SlowDown",
        "SlowDownRead",
        "SlowDownWrite",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
        "XAmzContentSHA256Mismatch",
    }
)
_FINAL_STATUSES = frozenset({501, 505})  # not implemented, version of HTTP


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a server said about a request that it refused.

    Args:
        status: Of HTTP.
        code: The service's own, such as ``NoSuchKey``; the status as text where the answer has no body.
        message: For people.
    """

    status: int
    code: str
    message: str

    @property
    def is_transient(self) -> bool:
        """Whether the same request may succeed later."""
        if self.code in _TRANSIENT_CODES or self.status in (408, 429):
            return True
        return self.status >= 500 and self.status not in _FINAL_STATUSES


def answer_of(error: BaseException) -> Answer | None:
    """Return the server's answer that ``error`` or what caused it carries; ``None`` where there was none."""
    for e in _causes(error):
        response = getattr(e, "response", None)
        if isinstance(response, dict) and isinstance(response.get("Error"), dict):
            said = response["Error"]
            metadata = response.get("ResponseMetadata") or {}
            return Answer(
                status=int(metadata.get("HTTPStatusCode") or 0),
                code=str(said.get("Code") or ""),
                message=str(said.get("Message") or ""),
            )
    return None


def is_transient(error: BaseException, types: tuple[type[BaseException], ...] = ()) -> bool:
    """Tell whether what failed may succeed later.

    Args:
        error: Of our tree, of the system, or of a client library.
        types: A client library's own errors for cut connections and timeouts.
    """
    if isinstance(error, StorageError):
        return error.retryable
    answer = answer_of(error)
    if answer is not None:
        return answer.is_transient
    lost: tuple[type[BaseException], ...] = (ConnectionError, TimeoutError, *types)
    return any(isinstance(e, lost) for e in _causes(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    at: BaseException | None = error
    while at is not None:
        yield at
        at = at.__cause__


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often and how long to try, with exponential backoff and full jitter.

    Args:
        max_tries: Tries in all, at least 1.
        total_s: No try starts later than this after the first.
        first_wait_s: Longest wait after the first try; doubles with each further one.
        longest_wait_s: Where the doubling ends.
        clock: Seconds that never go back.
        sleep: Waits so many seconds.
        draw: A number in [0, 1).

    Source: M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015 ("full jitter").
    """

    # With 30 % of requests refused, one in 170,000 is given up.
    max_tries: int = 10
    total_s: float = 300.0
    first_wait_s: float = 0.1
    longest_wait_s: float = 20.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    draw: Callable[[], float] = random.Random().random

    def __post_init__(self) -> None:
        if self.max_tries < 1:
            raise ValueError(f"max_tries is {self.max_tries}, 1 or more expected")

    def run(self, action: Callable[[int], T], transient: Callable[[BaseException], bool]) -> T:
        """Return what ``action`` returns, at the first try that succeeds.

        Args:
            action: Called with the number of earlier tries: where there were any, one of them may have
                succeeded although its answer was lost.
            transient: Whether an error is worth another try.

        Raises:
            Exception: The last try's error, with a note of how often and how long it was tried.
        """
        start = self.clock()
        for earlier in range(self.max_tries):
            try:
                return action(earlier)
            except Exception as e:
                wait_s = self.draw() * min(self.first_wait_s * 2**earlier, self.longest_wait_s)
                spent_s = self.clock() - start
                is_last = earlier + 1 == self.max_tries or spent_s + wait_s > self.total_s
                if is_last or not transient(e):
                    if earlier:
                        e.add_note(f"tried {earlier + 1} times in {spent_s:.0f} s")
                    raise
                logger.info("trying again in %.1f s, after %s", wait_s, type(e).__name__)
                self.sleep(wait_s)
        raise AssertionError("a loop over one try or more ends inside it")
