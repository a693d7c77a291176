"""One save as one rank sees it, from the call to the commit.

    called ─wait─> image free ─plan─> agreed ─copy────> staged
                                         └───persist────────> durable ─seal─> all are ─publish─> committed
    └──────────────────── stall: training waits ───────┘

``publish`` is the coordinator's; the others see it as a part of ``seal``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from fsdp_ckpt.errors import describe

__all__ = ["NO_SAVE", "Emit", "SaveTrace"]

T = TypeVar("T")


class Emit(Protocol):
    """How a trace tells: see :meth:`fsdp_ckpt.telemetry.tracing.Telemetry.emit`."""

    def __call__(
        self,
        name: str,
        begun_s: float,
        ended_s: float | None,
        *,
        step: int | None = None,
        attempt: str | None = None,
        **fields: Any,
    ) -> None: ...


class SaveTrace:
    """Follows one save; each method is called once at most, when what it says has happened.

    Args:
        emit: Takes what is known; ``None``: off.
        step: What is saved.
        mode: When the call returns.
    """

    __slots__ = (
        "_attempt",
        "_begun_s",
        "_durable_s",
        "_emit",
        "_lock",
        "_mode",
        "_num_bytes",
        "_publish_s",
        "_published_s",
        "_staging_s",
        "_step",
        "_waited_s",
        "_write",
    )

    def __init__(self, emit: Emit | None, step: int = 0, mode: str = "") -> None:
        self._emit = emit
        self._step = step
        self._mode = mode
        self._attempt: str | None = None
        self._num_bytes: int | None = None
        self._begun_s = self._waited_s = self._staging_s = 0.0
        self._durable_s: float | None = None
        self._publish_s: float | None = None
        self._published_s: float | None = None
        self._write: Future[Any] | None = None
        self._lock = threading.Lock()
        if emit is not None:
            self._begun_s = self._waited_s = time.monotonic()

    def _span(self, name: str, begun_s: float, ended_s: float | None, **fields: Any) -> None:
        if self._emit is not None:
            self._emit(name, begun_s, ended_s, step=self._step, attempt=self._attempt, **fields)

    def has_place(self) -> None:
        """There is an image to copy into, or it is known that there is none."""
        if self._emit is not None:
            self._waited_s = time.monotonic()

    def planned(self, attempt: str) -> None:
        """All ranks have agreed on what is saved, as this attempt."""
        if self._emit is None:
            return
        self._attempt = attempt
        self._staging_s = time.monotonic()
        self._span("save.wait", self._begun_s, self._waited_s)
        self._span("save.plan", self._waited_s, self._staging_s)

    def skipped(self) -> None:
        """Every image is in use, and this save is left out."""
        if self._emit is not None:
            self._span("save.skipped", time.monotonic(), None, reason="every image is in use")

    def refused(self, error: BaseException) -> None:
        """The save has failed before anything was copied."""
        if self._emit is not None:
            self._span("save.failed", time.monotonic(), None, error=describe(error))

    def imaged(self, begin: Callable[..., T]) -> Callable[..., T]:
        """Return ``begin``, which makes the image, as it is to be called."""
        if self._emit is None:
            return begin

        def begun(*args: Any) -> T:
            image = begin(*args)
            self._num_bytes = getattr(image, "num_bytes", None)
            return image

        return begun

    def copied(self, then: Callable[[], None]) -> Callable[[], None]:
        """Return ``then``, which is called when the copy has ended, as it is to be called."""
        if self._emit is None:
            return then

        def ended() -> None:
            then()
            self._span("save.copy", self._staging_s, time.monotonic(), bytes=self._num_bytes)

        return ended

    def publishing(self, publish: Callable[[T], Any]) -> Callable[[T], Any]:
        """Return ``publish``, which follows when all ranks are durable, as it is to be called."""
        if self._emit is None:
            return publish

        def published(receipts: T) -> Any:
            self._publish_s = time.monotonic()
            result = publish(receipts)
            self._published_s = time.monotonic()
            return result

        return published

    def follow(self, write: Future[Any], committed: Future[Any]) -> None:
        """Follow this rank's file and the commit to their ends."""
        if self._emit is not None:
            self._write = write
            write.add_done_callback(self._written)
            committed.add_done_callback(self._ended)

    def returned(self) -> None:
        """Training goes on."""
        if self._emit is not None:
            self._span("save.stall", self._begun_s, time.monotonic(), mode=self._mode)

    def _written(self, write: Future[Any]) -> None:
        if write.cancelled() or write.exception() is not None:
            return  # the commit fails, and says why
        with self._lock:
            if self._durable_s is not None:
                return
            self._durable_s = time.monotonic()
        self._span("save.persist", self._staging_s, self._durable_s, bytes=self._num_bytes)

    def _ended(self, committed: Future[Any]) -> None:
        # On the coordinator, before the others have heard of it.
        now_s = self._published_s or time.monotonic()
        error = None if committed.cancelled() else committed.exception()
        if self._write is not None and self._write.done():
            self._written(self._write)  # its own call may come later
        if self._durable_s is not None:
            self._span("save.seal", self._durable_s, self._publish_s or now_s)
        if self._publish_s is not None:
            self._span("save.publish", self._publish_s, now_s)
        if error is not None:
            self._span("save.failed", now_s, None, error=describe(error))
        elif not committed.cancelled():
            info = committed.result()
            self._span(
                "save.committed",
                now_s,
                None,
                mode=self._mode,
                bytes=getattr(info, "num_bytes", None),
                world_size=getattr(info, "world_size", None),
            )


NO_SAVE = SaveTrace(None)
