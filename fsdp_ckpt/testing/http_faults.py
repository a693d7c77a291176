"""Faults at HTTP requests, declared in the test; :mod:`fsdp_ckpt.testing.fault_proxy` makes them happen."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, get_args

from fsdp_ckpt.testing.faults import require_fired

__all__ = ["HttpFault", "HttpKind", "HttpPlan", "HttpRequest"]

HttpKind = Literal["slow_down", "cut_request", "cut_response", "reset", "lose_answer", "delay"]


@dataclass(frozen=True, slots=True)
class HttpFault:
    """What happens to which requests.

    Args:
        kind: ``slow_down``: answered 503 SlowDown, the server never sees it. ``cut_request``: the server
            receives half of the body and both connections are reset. ``cut_response``: the client receives
            half of the body. ``reset``: the client's connection is reset, the server never sees the request.
            ``lose_answer``: the server does it, then the client's connection is reset. ``delay``: sent later.
        count: Requests hit; ``None`` for as many as match and are drawn, at least one.
        share: Of the matching requests, drawn at random; 1 for each.
        skip: Matching requests that pass before the first draw.
        method: The only one hit, such as ``PUT``.
        key: Pattern (``fnmatch``) of the decoded path without its first slash: ``bucket/key``.
        query: Pattern of the query string, such as ``*partNumber=2*``.
        delay_s: Of a ``delay``, in seconds.
        seed: Of the draws.
    """

    kind: HttpKind
    count: int | None = 1
    share: float = 1.0
    skip: int = 0
    method: str | None = None
    key: str = "*"
    query: str = "*"
    delay_s: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in get_args(HttpKind):
            raise ValueError(f"no such kind of fault: {self.kind!r}")
        if not 0 < self.share <= 1 or self.skip < 0 or (self.count is not None and self.count < 1):
            raise ValueError(f"share in (0, 1], skip from 0, count from 1; found {self}")

    def matches(self, request: HttpRequest) -> bool:
        """Whether it is about this request; what has no body cannot be cut."""
        has_what_is_cut = {
            "cut_request": request.sent_bytes > 1,
            "cut_response": request.received_bytes > 1,
        }
        return (
            self.method in (None, request.method)
            and fnmatchcase(request.key, self.key)
            and fnmatchcase(request.query, self.query)
            and has_what_is_cut.get(self.kind, True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    """One request of the client and what became of it.

    Args:
        method: ``GET``, ``PUT``, ...
        key: Decoded path without its first slash.
        query: As sent, undecoded.
        sent_bytes: Length of its body.
        received_bytes: Length of the body of the server's answer, before any cut.
        status: That the client got; 0 where it got none.
        faults: Kinds that it was hit by.
    """

    method: str
    key: str
    query: str
    sent_bytes: int = 0
    received_bytes: int = 0
    status: int = 0
    faults: tuple[HttpKind, ...] = ()


class HttpPlan:
    """The faults of one proxy, and every request that it has seen; any thread may use it.

    Args:
        *faults: Of those that hit one request, all delays and the first other one take effect.
    """

    def __init__(self, *faults: HttpFault) -> None:
        self.faults = faults
        self._draws = [random.Random(fault.seed) for fault in faults]
        self._matched = [0] * len(faults)
        self._fired = [0] * len(faults)
        self._requests: list[HttpRequest] = []
        self._lock = threading.Lock()

    @property
    def requests(self) -> list[HttpRequest]:
        """Every request that has ended, in that order."""
        with self._lock:
            return list(self._requests)

    def note(self, request: HttpRequest) -> None:
        """Record a request that has ended."""
        with self._lock:
            self._requests.append(request)

    def fired(self, kind: HttpKind | None = None) -> int:
        """Return how often faults fired so far; of one kind, or all."""
        with self._lock:
            pairs = list(zip(self.faults, self._fired, strict=True))
        return sum(fired for fault, fired in pairs if kind in (None, fault.kind))

    def check_fired(self) -> None:
        """Check that every fault fired as often as declared.

        Raises:
            FaultNotFiredError: One did not.
        """
        with self._lock:
            require_fired(self.faults, self._fired, self._matched)

    def draw(self, request: HttpRequest, *kinds: HttpKind) -> list[HttpFault]:
        """Return what hits the request, of ``kinds``: delays, and at most one of the others."""
        due: list[HttpFault] = []
        with self._lock:
            for i, fault in enumerate(self.faults):
                if fault.kind not in kinds or not fault.matches(request):
                    continue
                if fault.kind != "delay" and any(other.kind != "delay" for other in due):
                    continue
                self._matched[i] += 1
                is_used_up = fault.count is not None and self._fired[i] >= fault.count
                if self._matched[i] <= fault.skip or is_used_up:
                    continue
                if self._draws[i].random() < fault.share:
                    self._fired[i] += 1
                    due.append(fault)
        return due
