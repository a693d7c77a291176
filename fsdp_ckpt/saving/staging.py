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

from fsdp_ckpt.dcp.shard_image import ShardImage, write_job
from fsdp_ckpt.errors import StorageError, describe
from fsdp_ckpt.manifest.typed_json import Json
from fsdp_ckpt.options import OnBusy, SaveMode, SaveOptions
from fsdp_ckpt.plan.image import Entry, ImageLayout
from fsdp_ckpt.saving.persisting import Persister
from fsdp_ckpt.snapshot.buffer import ImagePool
from fsdp_ckpt.snapshot.head_start import HeadStart
from fsdp_ckpt.snapshot.image import SideStreams
from fsdp_ckpt.storage.store import Store
from fsdp_ckpt.writer import PendingWrite, ShardWriter, WriteJob

__all__ = ["ImagePlace", "Snapshot", "Stager"]

logger = logging.getLogger("fsdp_ckpt")


class ImagePlace:
    """Leave to use one of the images in flight; given back once."""

    def __init__(self, places: threading.Semaphore, *, is_free: bool) -> None:
        self.is_free = is_free
        self.is_used = False
        self.head_start: HeadStart | None = None
        self.pending: PendingWrite | None = None  # of what the head start copies
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
                self._give_up_early(place)
                self._places.release()

    def open_early(self, place: ImagePlace, mode: SaveMode) -> None:
        """Have a writer begin a file, for an image that lies as the last one does.

        Args:
            place: For the image.
            mode: A ``lazy`` save has nothing to write before the ranks have agreed.
        """
        if not place.is_free or self._last is None or mode == "lazy":
            return
        data_offset, layout = self._last
        with _met_again("opening a file"):
            place.head_start = HeadStart(self._pool, data_offset, layout)
            job, buffer = self._job(data_offset, layout), place.head_start.buffer
            view = memoryview(buffer.memory)[: job.num_bytes]
            place.pending = self._writer(mode).submit(job, view, buffer.fd, self._root)
        if place.pending is None:
            self._give_up_early(place)

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
        head_start, pending = place.head_start, place.pending
        if head_start is not None and pending is not None and head_start.layout is layout:
            with _met_again("copying"):
                head_start.copy(resolve, is_over, SideStreams(), pending.filled)

    def _give_up_early(self, place: ImagePlace) -> None:
        """Let go of the file and of the buffer; what is still written from it is lost with the file."""
        head_start, place.head_start = place.head_start, None
        pending, place.pending = place.pending, None
        if pending is not None:
            pending.fail(StorageError("it was begun before the ranks had agreed, and they did not"))
        if head_start is not None:
            head_start.give_up()

    def _job(self, data_offset: int, layout: ImageLayout) -> WriteJob:
        return write_job(data_offset, layout, self._num_threads, self._address or {})

    def _writer(self, mode: SaveMode) -> ShardWriter:
        is_apart = (
            self._options.writer == "process" and self._address is not None and mode != "sync"
        )
        return self._persister.writer(in_process=is_apart)

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
        try:
            streams = SideStreams()
            image = begin(self._pool, place.head_start)
        except BaseException as e:
            self._give_up_early(place)
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

        try:
            pending = self._write(place, image, folder, mode)
        except BaseException as e:
            forget()
            place.end(2, release)
            if not isinstance(e, Exception):
                raise
            return _failed(e)
        write = _followed(pending.future, note_written, lambda: place.end(1, release))

        def report(num_bytes: int) -> None:
            # Beside training's steps, the sooner the copy is over the fewer of them are slower for it.
            if mode != "lazy" or num_bytes == image.num_bytes:
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

    def _write(
        self, place: ImagePlace, image: ShardImage, folder: str, mode: SaveMode
    ) -> PendingWrite:
        """Have the image written; into the file that was begun early, where it is what that is of."""
        name = image.file_name(folder)
        head_start, pending = place.head_start, place.pending
        if pending is not None and head_start is not None and not head_start.is_given_up:
            place.head_start = place.pending = None
            pending.name(name)
            return pending
        self._give_up_early(place)
        job = self._job(image.data_offset, image.contents.layout)
        return self._writer(mode).submit(job, image.view, image.buffer.fd, self._root, name)

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


@contextmanager
def _met_again(what: str) -> Iterator[None]:
    """Pass over a failure: the other ranks are on their way into the save, which has to fail in there."""
    try:
        yield
    except Exception as e:
        logger.warning("%s before the ranks have agreed: %s", what, describe(e))


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
