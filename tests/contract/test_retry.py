"""What is tried again, how often and how long."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from fsdp_ckpt.errors import NotFoundError, StorageError
from fsdp_ckpt.storage.retry import RetryPolicy, answer_of, is_transient


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.waits: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


@pytest.fixture
def time() -> Time:
    return Time()


def policy(time: Time, **options: Any) -> RetryPolicy:
    """The longest waits that may be drawn, on a clock of ours."""
    chosen = {"clock": lambda: time.now, "sleep": time.sleep, "draw": lambda: 1.0} | options
    return RetryPolicy(**chosen)


def failing(times: int, error: Exception) -> Callable[[int], str]:
    """An action that fails so many times; it checks that it is told how often it was tried."""
    calls = 0

    def act(earlier: int) -> str:
        nonlocal calls
        assert earlier == calls
        calls += 1
        if calls <= times:
            raise error
        return f"after {calls}"

    return act


class RefusedError(Exception):
    """As botocore's errors are."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(f"SlowDown InternalError {code}")  # the text decides nothing
        self.response = {
            "Error": {"Code": code, "Message": "m"},
            "ResponseMetadata": {"HTTPStatusCode": status},
        }


def test_what_passes_is_tried_until_it_does(time: Time) -> None:
    """Each wait may be twice as long as the one before, up to the longest."""
    act = failing(6, ConnectionResetError())
    assert policy(time, longest_wait_s=2.0).run(act, is_transient) == "after 7"
    assert time.waits == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0]


def test_waits_are_drawn_from_zero_on(time: Time) -> None:
    """Ranks that failed together do not come back together."""
    draws = iter([0.0, 0.5, 0.25])
    act = failing(3, ConnectionResetError())
    policy(time, draw=lambda: next(draws)).run(act, is_transient)
    assert time.waits == [0.0, 0.1, 0.1]


def test_tries_are_bounded_in_number(time: Time) -> None:
    """The last error comes out, and says how often it was tried."""
    error = ConnectionResetError()
    with pytest.raises(ConnectionResetError) as caught:
        policy(time, max_tries=4).run(failing(99, error), is_transient)
    assert caught.value is error
    assert len(time.waits) == 3
    assert error.__notes__ == ["tried 4 times in 1 s"]


def test_tries_are_bounded_in_time(time: Time) -> None:
    """No try starts after the end, and no wait goes past it."""
    with pytest.raises(TimeoutError):
        policy(time, max_tries=10**6, total_s=60.0).run(
            failing(10**6, TimeoutError()), is_transient
        )
    assert time.now - 1000.0 <= 60.0
    assert len(time.waits) > 5


def test_the_time_that_tries_take_counts(time: Time) -> None:
    """A try that hangs until its own deadline uses up the time of the others."""

    def hang(earlier: int) -> None:
        time.now += 50.0
        raise TimeoutError

    with pytest.raises(TimeoutError):
        policy(time, total_s=120.0).run(hang, is_transient)
    assert len(time.waits) == 2


@pytest.mark.parametrize(
    "error",
    [RefusedError(403, "AccessDenied"), FileNotFoundError(), ValueError("SlowDown"), NotFoundError("k")],
)  # fmt: skip
def test_what_stays_is_tried_once(time: Time, error: Exception) -> None:
    """Denied, absent and malformed requests fail at once, without a note about tries."""
    notes = list(getattr(error, "__notes__", []))
    with pytest.raises(type(error)) as caught:
        policy(time).run(failing(99, error), is_transient)
    assert caught.value is error
    assert time.waits == []
    assert getattr(error, "__notes__", []) == notes


def test_an_interrupt_is_no_failure(time: Time) -> None:
    """What ends the program is never tried again."""

    def interrupt(earlier: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        policy(time).run(interrupt, lambda e: True)
    assert time.waits == []


def test_a_policy_tries_at_least_once() -> None:
    """A number of tries below one is refused."""
    with pytest.raises(ValueError, match="max_tries"):
        RetryPolicy(max_tries=0)


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (503, "SlowDown", True), (503, "ServiceUnavailable", True), (429, "TooManyRequests", True),
        (429, "Whatever", True), (500, "InternalError", True), (502, "502", True), (504, "504", True),
        (200, "InternalError", True), (200, "SlowDown", True), (400, "RequestTimeout", True),
        (400, "IncompleteBody", True), (400, "BadDigest", True), (409, "ConditionalRequestConflict", True),
        (400, "InvalidArgument", False), (400, "400", False), (403, "AccessDenied", False),
        (403, "403", False), (404, "NoSuchKey", False), (404, "404", False),
        (412, "PreconditionFailed", False), (416, "InvalidRange", False), (501, "NotImplemented", False),
    ],
)  # fmt: skip
def test_answers_are_sorted_by_status_and_code(status: int, code: str, expected: bool) -> None:
    """A refusal is what its status and code say, also where a library has wrapped it in another error."""
    error = RefusedError(status, code)
    assert is_transient(error) is expected
    wrapped = TimeoutError("wrapped") if not expected else PermissionError("wrapped")
    wrapped.__cause__ = error
    assert is_transient(wrapped) is expected
    answer = answer_of(wrapped)
    assert answer is not None
    assert (answer.status, answer.code) == (status, code)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConnectionRefusedError(), True), (BrokenPipeError(), True), (TimeoutError(), True),
        (StorageError("x", retryable=True), True), (StorageError("x"), False), (OSError("timed out"), False),
        (KeyError("x"), False),
    ],
    ids=repr,
)  # fmt: skip
def test_errors_are_sorted_by_type(error: Exception, expected: bool) -> None:
    """Lost connections and timeouts pass; what only reads like one does not."""
    assert is_transient(error) is expected


def test_a_librarys_own_errors_count_where_named() -> None:
    """A client library's type is transient when the caller says so."""

    class CutError(Exception):
        pass

    assert not is_transient(CutError())
    assert is_transient(CutError(), (CutError,))


def test_waits_are_logged(time: Time, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever looks why a save is slow finds the reason."""
    with caplog.at_level(logging.INFO, "fsdp_ckpt"):
        policy(time).run(failing(1, ConnectionResetError("secret")), is_transient)
    assert "ConnectionResetError" in caplog.text
    assert "secret" not in caplog.text
