"""From live tensors into the image: the only moment for which training may have to wait.

Entries are copied in the order in which they lie in the image, so that what is filled can be written while
the rest is still being copied.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeAlias

import torch

from fsdp_ckpt.plan.image import Entry, ImageLayout
from fsdp_ckpt.snapshot.buffer import HostBuffer
from fsdp_ckpt.snapshot.host_copy import HostCopy, is_plain

__all__ = ["Filled", "SideStreams", "fill_image", "view_bytes", "view_entry"]

Memory: TypeAlias = HostBuffer | mmap.mmap | memoryview
Filled: TypeAlias = Callable[[int], None]

# How often the writer hears of progress: soon of the first bytes, so that it can begin, then after twice as
# many each time, up to a twelfth of the image. It has much to do by then, and each time it wakes its threads.
STRIDE_BYTES = 16 * 1024 * 1024
NUM_REPORTS = 12
NUM_AHEAD = 64


def view_bytes(buffer: Memory, start: int, stop: int) -> torch.Tensor:
    """Return a uint8 tensor over ``buffer[start:stop]``, sharing its memory, shape (stop - start,)."""
    if start == stop:
        return torch.empty(0, dtype=torch.uint8)
    memory = buffer.memory if isinstance(buffer, HostBuffer) else buffer
    return torch.frombuffer(memory, dtype=torch.uint8, count=stop - start, offset=start)


def view_entry(buffer: Memory, data_offset: int, entry: Entry, dtype: torch.dtype) -> torch.Tensor:
    """Return the entry as a tensor over the image's memory, of the chunk's shape."""
    start = data_offset + entry.byte_offset
    return view_bytes(buffer, start, start + entry.num_bytes).view(dtype).view(entry.box.sizes)


def _targets(buffer: Memory, data_offset: int, layout: ImageLayout) -> dict[Any, torch.Tensor]:
    """Return the views that were made before of the same layout in the same buffer: they cost as much as
    copying some hundred KiB each.
    """
    if not isinstance(buffer, HostBuffer):
        return {}
    if buffer.views_are_of != (layout, data_offset):
        buffer.views_are_of, buffer.views = (layout, data_offset), {}
    return buffer.views


def fill_image(
    buffer: Memory,
    data_offset: int,
    layout: ImageLayout,
    resolve: Callable[[Entry], torch.Tensor],
    *,
    entries: Iterable[Entry] | None = None,
    filled: Filled | None = None,
    is_over: Callable[[], bool] = lambda: False,
    host_copy: HostCopy | None = None,
    streams: SideStreams | None = None,
) -> int:
    """Copy live tensors into the image; they may change again when this returns.

    Args:
        buffer: At least ``data_offset + layout.data_bytes`` bytes.
        data_offset: Start of the data, in bytes.
        layout: Where each entry goes.
        resolve: Entry → live local tensor of the chunk's shape, on any device.
        entries: Those to copy, in the image's order; by default all. The others count as filled.
        filled: Told now and then how many bytes of the image are filled; of all of them by the caller.
        is_over: Asked before each entry whether to leave it and those after it.
        host_copy: Copies what is in host memory; by default without digests.
        streams: Where accelerators copy; by default after what this thread has queued.

    Returns:
        How many entries were copied.
    """
    num_bytes = data_offset + layout.data_bytes
    reported = num_copied = 0
    host_copy = host_copy or HostCopy(layout.data_bytes)
    streams = streams or SideStreams()

    def report(stop: int) -> None:
        nonlocal reported
        stride = max(STRIDE_BYTES, min(reported, num_bytes // NUM_REPORTS))
        if filled is not None and stop - reported >= stride and stop < num_bytes:
            streams.wait()
            filled(stop)
            reported = stop

    with torch.no_grad():
        for part in _parts(buffer, data_offset, layout, resolve, entries):
            if is_over():
                break
            start = part.entry.byte_offset
            report(data_offset + start)
            for stop in part.copy(STRIDE_BYTES, host_copy, streams):
                report(data_offset + start + stop)
            num_copied += 1
    streams.wait()
    return num_copied


def _parts(
    buffer: Memory,
    data_offset: int,
    layout: ImageLayout,
    resolve: Callable[[Entry], torch.Tensor],
    entries: Iterable[Entry] | None,
) -> Iterator[_Part]:
    """Find what goes where, for some entries ahead: between two copies nothing of this is in the cache."""
    targets = _targets(buffer, data_offset, layout)
    rest = iter(layout.entries if entries is None else entries)
    while ahead := list(islice(rest, NUM_AHEAD)):
        parts: list[_Part] = []
        for entry in ahead:
            source = resolve(entry).detach()
            target = targets.get((entry.key, source.dtype))
            if target is None:
                target = view_entry(buffer, data_offset, entry, source.dtype)
                targets[entry.key, source.dtype] = target
            parts.append(_Part(entry, target, source))
        yield from parts


class _Part:
    """A live tensor and where it goes."""

    __slots__ = ("_memory", "_source", "_target", "entry")

    def __init__(self, entry: Entry, target: torch.Tensor, source: torch.Tensor) -> None:
        self.entry = entry
        self._target = target
        self._source = source
        self._memory = (
            (target.data_ptr(), source.data_ptr(), target.nbytes)
            if is_plain(target, source)
            else None
        )

    def copy(self, stride: int, host_copy: HostCopy, streams: SideStreams) -> Iterator[int]:
        """Copy it, in pieces of ``stride`` bytes; yield the end of each."""
        if self._memory is not None:
            target, source, num_bytes = self._memory
            for at in range(0, num_bytes, stride):
                size = min(stride, num_bytes - at)
                host_copy.copy(self.entry.byte_offset + at, target + at, source + at, size)
                yield at + size
            return
        done = 0
        for piece, into in _pieces(self._source, self._target, stride):
            if piece.is_cuda:
                with streams.of(piece):
                    into.copy_(piece, non_blocking=True)
            else:
                into.copy_(piece)
            done += into.nbytes
            yield done


def _pieces(
    source: torch.Tensor, target: torch.Tensor, stride: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Cut a large tensor, so that its first bytes are written before its last are copied."""
    num_bytes = source.numel() * source.element_size()
    if num_bytes <= stride or not source.is_contiguous():
        yield source, target
        return
    step = stride // source.element_size()
    flat, into = source.view(-1), target.view(-1)
    for start in range(0, flat.numel(), step):
        stop = min(start + step, flat.numel())
        yield flat[start:stop], into[start:stop]


class SideStreams:
    """One copying stream per CUDA device, beside the streams on which training computes.

    Made on the thread that trains: copies come after what it has queued so far.
    """

    def __init__(self) -> None:
        self._starts: dict[int, torch.cuda.Event] = {}
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch lacks types
            for index in range(torch.cuda.device_count()):
                if torch.cuda.memory_reserved(index):  # elsewhere there is nothing to copy
                    self._starts[index] = torch.cuda.current_stream(index).record_event()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def of(self, source: torch.Tensor) -> torch.cuda.StreamContext:
        """Return the context in which to copy ``source``, a CUDA tensor."""
        device = source.device
        if device not in self._streams:
            stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # likewise
            start = self._starts.get(
                torch.cuda.current_device() if device.index is None else device.index
            )
            if start is None:
                torch.cuda.synchronize(device)
            else:
                stream.wait_event(start)
            self._streams[device] = stream
        source.record_stream(self._streams[device])
        return torch.cuda.stream(self._streams[device])

    def wait(self) -> None:
        """Return when everything queued so far is in host memory."""
        for stream in self._streams.values():
            stream.synchronize()
