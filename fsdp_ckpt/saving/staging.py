"""Snapshots: images of the live state, each on its way to a writer while it is still being filled.

Invariant: what is in an image when ``staged`` is set is the state at the call of ``save``; an image is used
again only when it is both copied and written.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from fsdp_ckpt.dcp.shard_image import ShardImage
from fsdp_ckpt.errors import describe
from fsdp_ckpt.manifest.typed_json import Json
from fsdp_ckpt.options import OnBusy, SaveMode, SaveOptions
from fsdp_ckpt.plan.image import Entry, ImageLayout
from fsdp_ckpt.saving.persisting import Persister
from fsdp_ckpt.snapshot.buffer import ImagePool
from fsdp_ckpt.snapshot.head_start import HeadStart
from fsdp_ckpt.snapshot.image import SideStreams
from fsdp_ckpt.storage.store import Store

__all__ = ["ImagePlace", "Snapshot", "Stager"]

logger = logging.getLogger("fsdp_ckpt")

# Share of the image that is filled before the first of it is written. Writing takes processor and memory from
# the copy. That is no loss where training waits for the commit, a small one where it waits for the copy; and
# where it goes on beside the copy, the sooner that is over the fewer steps are slower for it.
FIRST_WRITTEN: Mapping[SaveMode, float] = {"sync": 0.0, "async": 0.3, "lazy": 1.0}


class ImagePlace:
    """Leave to use one of the images in flight; given back once."""

    def __init__(self, places: threading.Semaphore, *, is_free: bool) -> None:
        self.is_free = is_free
        self.is_used = False
        self.head_start: HeadStart | None = None
        self._places = places
        # The copy and the write, whichever ends last.
        self._open_ends = 2
        self._lock = threading.Lock()

    def end(self, ends: int, release: Callable[[], None]) -> None:
        """Say that the copy, the write or both have ended; after both, ``release`` and give back."""
        with self._lock:
            self._open_ends -= ends
            is_last = self._open_ends == 0
        if is_last:
            release()
            self._places.release()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A rank's part of a save.

    Args:
        write: Resolves when this rank's file is durable, to the digest of its header.
        receipt: That digest → what to tell the coordinator.
        staged: Set when the live state may change again.
    """

    write: Future[str]
    receipt: Callable[[str], Json]
    staged: threading.Event


class Stager:
    """Takes snapshots, one at a time, into images that are used again.

    Args:
        root: Where the files go.
        persister: Has the writers.
        options: How a save goes.
        pool: Of buffers for images.
        address: Url and storage options with which another process opens ``root``; ``None`` if none can.
        num_threads: Threads that write, per rank.
    """

    def __init__(
        self,
        root: Store,
        persister: Persister,
        options: SaveOptions,
        pool: ImagePool,
        *,
        address: Mapping[str, Any] | None,
        num_threads: int | None,
    ) -> None:
        self._root = root
        self._persister = persister
        self._options = options
        self._address = address
        self._num_threads = num_threads
        self._pool = pool
        self._places = threading.Semaphore(options.max_in_flight)
        self._last: tuple[int, ImageLayout] | None = None  # the newest image's data
        self._staged = threading.Event()  # of the newest snapshot
        self._staged.set()
        self._hook: RemovableHandle | None = None
        # Told since when training has waited for the copy, when it need not any more.
        self.held: Callable[[float], None] = lambda begun_s: None
        self._copier = ThreadPoolExecutor(1, "fsdp_ckpt-copy")

    @contextmanager
    def take_image(self, on_busy: OnBusy, timeout_s: float) -> Iterator[ImagePlace]:
        """Take a place for an image, if there is one; given back unless a snapshot came to use it."""
        if on_busy == "wait":
            # It comes back when a file is durable or has failed, each within the deadline.
            is_free = self._places.acquire(timeout=2 * timeout_s)
        else:
            is_free = self._places.acquire(blocking=False)
        place = ImagePlace(self._places, is_free=is_free)
        try:
            yield place
        finally:
            if is_free and not place.is_used:
                if place.head_start is not None:
                    self._pool.release(place.head_start.buffer)
                self._places.release()

    def begin_early(
        self,
        place: ImagePlace,
        layout: ImageLayout,
        resolve: Callable[[Entry], torch.Tensor],
        is_over: Callable[[], bool],
    ) -> None:
        """Copy what can be copied before it is over, where the next image will lie as the last one does.

        Args:
            place: For the image.
            layout: Of its data, as far as this rank knows.
            resolve: Entry → live local tensor.
            is_over: Whether the ranks have agreed.
        """
        if not place.is_free or self._last is None or self._last[1] is not layout:
            return
        data_offset = self._last[0]
        try:
            buffer = self._pool.acquire(data_offset + layout.data_bytes)
            place.head_start = HeadStart(buffer, data_offset, layout)
            place.head_start.copy(resolve, is_over, SideStreams())
        except Exception as e:
            # The other ranks are on their way into the save: if it fails, it must fail in there.
            logger.warning("copying before the ranks have agreed: %s", describe(e))

    def stage(
        self,
        place: ImagePlace,
        begin: Callable[[ImagePool, HeadStart | None], ShardImage],
        *,
        folder: str,
        mode: SaveMode,
        is_late: Callable[[Entry], bool],
        forget: Callable[[], None],
    ) -> Snapshot:
        """Take a snapshot; a failure is the snapshot's outcome, so that all ranks learn of it alike.

        Args:
            place: For the image.
            begin: Makes the image, its header in place, with what was copied early.
            folder: Where in the root its file goes.
            mode: ``lazy`` returns before the late entries are copied.
            is_late: Whether an entry changes in ``optimizer.step()`` alone.
            forget: Lets go of the live tensors; called when the snapshot is taken.
        """
        place.is_used = True
        staged = threading.Event()
        head_start, place.head_start = place.head_start, None
        try:
            image = begin(self._pool, head_start)
        except BaseException as e:
            if head_start is not None:
                self._pool.release(head_start.buffer)
            place.end(2, forget)
            if not isinstance(e, Exception):
                raise
            return _failed(e)

        written: list[str] = []  # the name of the file, once it is durable

        self._last = image.data_offset, image.contents.layout

        def release() -> None:
            self._pool.release(image.buffer, holds="".join(written))

        def note_written() -> None:
            written.append(image.name)

        is_apart = (
            self._options.writer == "process" and self._address is not None and mode != "sync"
        )
        writer = self._persister.writer(in_process=is_apart)
        job = image.job(f"{folder}/{image.name}", self._num_threads, self._address or {})
        try:
            streams = SideStreams()
            pending = writer.submit(job, image.view, image.buffer.fd, self._root)
        except BaseException as e:
            forget()
            place.end(2, release)
            if not isinstance(e, Exception):
                raise
            return _failed(e)
        write = _followed(pending.future, note_written, lambda: place.end(1, release))

        first_written = int(image.num_bytes * FIRST_WRITTEN[mode])

        def report(num_bytes: int) -> None:
            if num_bytes >= first_written:
                pending.filled(num_bytes)

        def copy(only: Callable[[Entry], bool] | None, *, is_last: bool = True) -> None:
            try:
                image.fill(report if is_last else None, only, streams)
            except BaseException as e:
                pending.fail(e)
                if not isinstance(e, Exception):
                    is_last = True  # no other part will come
                    raise
            finally:
                if is_last:
                    forget()
                    place.end(1, release)
                    staged.set()

        self._staged = staged
        if mode == "lazy":
            self._hold_steps()
            copy(lambda entry: not is_late(entry), is_last=False)
            self._copier.submit(copy, is_late)
        else:
            copy(None)
        return Snapshot(write, lambda digest: image.receipt(digest).to_json(), staged)

    def _hold_steps(self) -> None:
        """Make every optimizer's ``step`` wait for the copy; the user need not."""
        if self._hook is None:
            self._hook = register_optimizer_step_pre_hook(lambda *_: self._hold_step())

    def _hold_step(self) -> None:
        if not self._staged.is_set():
            begun_s = time.monotonic()
            self.wait_staged()
            self.held(begun_s)

    def wait_staged(self) -> None:
        """Return when the live state may change again."""
        self._staged.wait()

    def close(self) -> None:
        """Let optimizers go on without asking, and end the copying thread."""
        self._copier.shutdown()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def _followed(
    write: Future[str], succeeded: Callable[[], None], ended: Callable[[], None]
) -> Future[str]:
    """Return a future that comes to the same end after these calls: who waits for it finds the image free."""
    followed: Future[str] = Future()

    def follow(write: Future[str]) -> None:
        error = write.exception()
        if error is None:
            succeeded()
        ended()
        if error is None:
            followed.set_result(write.result())
        else:
            followed.set_exception(error)

    write.add_done_callback(follow)
    return followed


def _failed(error: Exception) -> Snapshot:
    write: Future[str] = Future()
    write.set_exception(error)
    staged = threading.Event()
    staged.set()
    return Snapshot(write, str, staged)
