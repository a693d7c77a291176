"""The thread through which everything told leaves the program.

Invariant: whoever tells waits for nothing: a queue that is full drops what comes, and counts it. What goes
wrong, in a store or in a callback, is logged once per kind and stops nothing else.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from fsdp_ckpt.errors import describe
from fsdp_ckpt.telemetry.event import URGENT, Event
from fsdp_ckpt.telemetry.log import TelemetryLog

__all__ = ["Outlet"]

logger = logging.getLogger("fsdp_ckpt")

MAX_PENDING = 10_000
CLOSE_S = 60.0


class Outlet:
    """Takes events from any thread; writes lines, and calls back, on one of its own.

    Args:
        log: Where lines go; ``None`` for nowhere.
        on_event: Called with each event, in order, on the outlet's thread.
        flush_s: Seconds after which a line is on storage.
        is_urgent: Names after which lines go at once.
        prepare: Called first, on the outlet's thread.
    """

    def __init__(
        self,
        log: TelemetryLog | None,
        on_event: Callable[[Event], None] | None,
        *,
        flush_s: float,
        is_urgent: frozenset[str] = URGENT,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self._log = log
        self._on_event = on_event
        self._flush_s = flush_s
        self._is_urgent = is_urgent
        self._prepare = prepare
        self._queue: queue.Queue[Event | None] = queue.Queue(MAX_PENDING)
        self.num_dropped = 0
        self._is_ended = False
        self._said: set[str] = set()
        # A daemon: a store that hangs must not keep the program from ending.
        self._thread = threading.Thread(target=self._run, name="fsdp_ckpt-telemetry", daemon=True)
        self._thread.start()

    def put(self, event: Event) -> None:
        """Take an event; returns at once."""
        try:
            self._queue.put_nowait(event)
        except queue.Full:
            self.num_dropped += 1

    def close(self) -> None:
        """Write what is left, and end; a store that takes longer than a minute is left to itself."""
        with suppress(queue.Full):  # the thread hangs, as is said below
            self._queue.put(None, timeout=CLOSE_S)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            logger.warning("telemetry: the store takes too long; the last lines may be missing")
        elif self.num_dropped:
            logger.warning("telemetry: %d events came too fast to be kept", self.num_dropped)

    def _run(self) -> None:
        if self._prepare is not None:
            self._safely("looking after older telemetry", self._prepare)
        due_s: float | None = None
        while True:
            event = self._next(due_s)
            if event is not None:
                self._take(event)
                if due_s is None:
                    due_s = time.monotonic() + self._flush_s
            is_due = due_s is not None and time.monotonic() >= due_s
            if event is None or is_due or event.name in self._is_urgent:
                due_s = None
                if self._log is not None:
                    self._safely("writing telemetry", self._log.flush)
            if event is None and self._is_ended:
                return

    def _next(self, due_s: float | None) -> Event | None:
        """Return the next event, or ``None`` when it is time to flush, or to end."""
        try:
            wait_s = None if due_s is None else max(due_s - time.monotonic(), 0.0)
            event = self._queue.get(timeout=wait_s)
        except queue.Empty:
            return None
        self._is_ended = event is None
        return event

    def _take(self, event: Event) -> None:
        if self._log is not None:
            self._log.add(event)
        if self._on_event is not None:
            told = self._on_event
            self._safely(f"the callback for {event.name}", lambda: told(event))

    def _safely(self, what: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as e:
            if what not in self._said:
                self._said.add(what)
                logger.warning("%s failed, and goes on without more words: %s", what, describe(e))
