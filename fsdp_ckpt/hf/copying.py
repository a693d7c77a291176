"""From verified segments to output files, window by window, by several threads.

    window of a file --plan--> segments --copy--> window buffer --> written

A window is a part of the file from one page, or one part of a multipart object, to another, so that it is
written as it lies in memory. A thread has one window buffer, which it uses again.

Invariant: a file is committed after its last window, and by then every byte of it came from a verified
segment. The first failure ends all threads, and drops every file that is not committed.
"""

from __future__ import annotations

import mmap
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from fsdp_ckpt.errors import CheckpointError, MismatchError
from fsdp_ckpt.hf.layout import OutputFile
from fsdp_ckpt.hf.output import OutputFolder
from fsdp_ckpt.hf.planning import Plan
from fsdp_ckpt.hf.segments import SourceSegments
from fsdp_ckpt.hf.source import Fill, Want, copy_parts, plan_fill
from fsdp_ckpt.plan.image import PAGE_BYTES
from fsdp_ckpt.storage.store import ObjectWriter

__all__ = ["CopyOptions", "copy_files", "refuse_overflows", "wants_of"]

# As many windows of a multipart object, whose parts may be large, are in memory as fit into this.
WINDOWS_BYTES = 128 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOptions:
    """How files are written.

    Args:
        num_threads: Windows in work at a time.
        window_bytes: Bytes of a file that are written at a time; rounded up to a page.
        buffer_bytes: For segments of the source.
        allow_overflow: Write infinity for numbers that a narrower dtype cannot hold.
    """

    num_threads: int = 4
    window_bytes: int = 8 * 1024 * 1024
    buffer_bytes: int = 96 * 1024 * 1024
    allow_overflow: bool = False

    def __post_init__(self) -> None:
        for name in ("num_threads", "window_bytes", "buffer_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, 1 or more expected")


@dataclass(slots=True, eq=False)
class _OpenFile:
    """A file that is being written."""

    file: OutputFile
    writer: ObjectWriter
    num_windows: int
    position: int = 0  # of a writer that takes bytes in order
    overflows: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class _Window:
    """The bytes [start, stop) of a file, and what they are filled with."""

    target: _OpenFile
    start: int
    stop: int
    fill: Fill


def copy_files(
    plan: Plan,
    files: Sequence[OutputFile],
    output: OutputFolder,
    options: CopyOptions,
    on_written: Callable[[int], None],
) -> None:
    """Write files; each is whole when this returns, and those that are not are dropped when this raises.

    Args:
        plan: What the files consist of.
        files: Those to write.
        output: Where to.
        options: How.
        on_written: Called with the number of bytes of each window that is written, by one thread at a time.

    Raises:
        CorruptCheckpointError: The source is missing, short or damaged.
        MismatchError: Numbers overflow, and that is not allowed.
        StorageError: A store failed.
    """
    _Copying(plan, files, output, options, on_written).run()


class _Copying:
    def __init__(
        self,
        plan: Plan,
        files: Sequence[OutputFile],
        output: OutputFolder,
        options: CopyOptions,
        on_written: Callable[[int], None],
    ) -> None:
        self._plan = plan
        self._options = options
        self._output = output
        self._on_written = on_written
        self._segments = SourceSegments(
            plan.checkpoint,
            buffer_bytes=options.buffer_bytes,
            num_files=plan.checkpoint.manifest.world_size,
            num_threads=options.num_threads,
        )
        self._windows = self._plan_windows(files)
        self._ahead: deque[_Window] = deque()
        self._open: list[_OpenFile] = []
        self._bytes_in_work = 0
        self._has_failed = False
        self._changed = threading.Condition()

    def run(self) -> None:
        num_threads = self._options.num_threads
        try:
            with ThreadPoolExecutor(num_threads, "fsdp_ckpt-copy") as threads:
                pending = [threads.submit(self._work) for _ in range(num_threads)]
                try:
                    for future in pending:
                        future.result()
                except BaseException:  # an interrupt of the waiting thread, too
                    self._fail()
                    raise
        except BaseException:
            # Not before all threads have stopped: one of them might be writing.
            for opened in self._open:
                with suppress(CheckpointError):  # the first error is the one to know
                    opened.writer.abort()
            raise

    def _fail(self) -> None:
        with self._changed:
            self._has_failed = True
            self._changed.notify_all()

    def _work(self) -> None:
        buffer = memoryview(b"")
        try:
            while (window := self._next()) is not None:
                num_bytes = window.stop - window.start
                if len(buffer) < num_bytes:
                    buffer = memoryview(mmap.mmap(-1, num_bytes))
                self._fill(window, buffer[:num_bytes])
                self._put(window, buffer[:num_bytes])
        except BaseException:
            self._fail()
            raise

    def _plan_windows(self, files: Sequence[OutputFile]) -> Iterator[_Window]:
        pages = -(-self._options.window_bytes // PAGE_BYTES) * PAGE_BYTES
        for file in files:
            writer = self._output.write(file.name, file.num_bytes)
            size = (
                -(-pages // writer.part_bytes) * writer.part_bytes if writer.part_bytes else pages
            )
            opened = _OpenFile(file, writer, -(-file.num_bytes // size))
            self._open.append(opened)
            for start in range(0, file.num_bytes, size):
                stop = min(start + size, file.num_bytes)
                wants = wants_of(self._plan, file, start, stop)
                fill = plan_fill(self._plan.checkpoint, wants, self._segments.segment_bytes)
                self._segments.expect(fill)
                yield _Window(opened, start, stop, fill)

    def _next(self) -> _Window | None:
        """Return the next window to work on, in the order of the files; ``None`` where none is left."""
        with self._changed:
            # Planned ahead, so that a segment that the next windows need stays.
            while len(self._ahead) <= self._options.num_threads and not self._has_failed:
                window = next(self._windows, None)
                if window is None:
                    break
                self._ahead.append(window)
            while self._ahead and not self._has_failed:
                num_bytes = self._ahead[0].stop - self._ahead[0].start
                if not self._bytes_in_work or self._bytes_in_work + num_bytes <= WINDOWS_BYTES:
                    self._bytes_in_work += num_bytes
                    return self._ahead.popleft()
                self._changed.wait()
            return None

    def _fill(self, window: _Window, buffer: memoryview) -> None:
        header = window.target.file.header[window.start : window.stop]
        buffer[: len(header)] = header
        for key, parts in window.fill.items():
            with self._segments.using(key) as segment:
                overflows = copy_parts(parts, segment, buffer)
            if overflows:
                with self._changed:
                    window.target.overflows.update(overflows)

    def _put(self, window: _Window, data: memoryview) -> None:
        target = window.target
        if target.writer.ordered:
            with self._changed:
                while target.position != window.start and not self._has_failed:
                    self._changed.wait()
        if self._has_failed:
            return
        target.writer.write_at(window.start, data)
        with self._changed:
            self._bytes_in_work -= len(data)
            target.position = window.stop
            target.num_windows -= 1
            is_last = not target.num_windows
            self._on_written(len(data))
            self._changed.notify_all()
        if is_last:
            self._commit(target)

    def _commit(self, target: _OpenFile) -> None:
        if not self._options.allow_overflow:
            refuse_overflows(target.overflows, self._plan)
        with self._changed:
            if self._has_failed:
                return
            self._open.remove(target)
        try:
            target.writer.commit()
        except BaseException:
            with suppress(CheckpointError):
                target.writer.abort()
            raise


def wants_of(plan: Plan, file: OutputFile, start: int, stop: int) -> Iterator[Want]:
    """Yield what the bytes [start, stop) of a file consist of, behind its header."""
    data_offset = len(file.header)
    for region in file.regions(max(start - data_offset, 0), max(stop - data_offset, 0)):
        yield Want(
            region.tensor.name,
            plan.selected.rows[region.tensor.name],
            region.box,
            region.tensor.dtype,
            data_offset + region.byte_offset - start,
        )


def refuse_overflows(overflows: Counter[str], plan: Plan) -> None:
    """Refuse numbers that became infinite.

    Raises:
        MismatchError: There are some.
    """
    if not overflows:
        return
    name, count = overflows.most_common(1)[0]
    raise MismatchError(
        f"{overflows.total()} numbers of {len(overflows)} tensors are too large for {plan.dtype}, most "
        f"of them in {name} ({count}); choose a wider dtype, or allow overflow",
        step=plan.checkpoint.manifest.step,
        key=name,
    )
