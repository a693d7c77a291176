"""One rank's part in a consolidation on several: it reads some source files and writes some output files.

    each round:  readers: source --verified--> pieces --gloo--> owners: pieces -> window -> output file

Invariant: after reading, before anything is sent, the ranks agree that all of them go on with the round, or
all raise the same error. A window is written while the next round is read.
"""

from __future__ import annotations

import mmap
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise

import torch
import torch.distributed as dist

from fsdp_ckpt.errors import CheckpointError, RankFailureError, describe
from fsdp_ckpt.hf.copying import CopyOptions, refuse_overflows
from fsdp_ckpt.hf.layout import OutputFile
from fsdp_ckpt.hf.output import OutputFolder
from fsdp_ckpt.hf.planning import Plan
from fsdp_ckpt.hf.rounds import Round, Window, plan_rounds, share_out
from fsdp_ckpt.hf.segments import SegmentKey, SourceSegments
from fsdp_ckpt.hf.source import Fill, Want, copy_parts, plan_fill
from fsdp_ckpt.plan.box import relative_slices
from fsdp_ckpt.plan.image import PAGE_BYTES
from fsdp_ckpt.ranks.group import RankGroup
from fsdp_ckpt.storage.in_order import InOrderWriter
from fsdp_ckpt.storage.shard_io import run_all

__all__ = ["RankedCopy"]


class RankedCopy:
    """This rank's part in the rounds."""

    def __init__(
        self,
        plan: Plan,
        files: Sequence[OutputFile],
        readers: Sequence[int],
        output: OutputFolder,
        options: CopyOptions,
        group: RankGroup,
    ) -> None:
        self._plan = plan
        self._options = options
        self._group = group
        # The ranks' own group may know no host memory.
        is_gloo = dist.get_backend() == "gloo"
        self._data_group = dist.group.WORLD if is_gloo else dist.new_group(backend="gloo")
        self._output = output
        self._segments = SourceSegments(
            plan.checkpoint,
            buffer_bytes=options.buffer_bytes,
            # Each owner is at another place of each file.
            num_files=max(readers.count(group.rank) * group.world_size, 1),
            num_threads=options.num_threads,
        )
        window_bytes = -(-options.window_bytes // PAGE_BYTES) * PAGE_BYTES
        owners = share_out([file.num_bytes for file in files], group.world_size)
        self._rounds = plan_rounds(plan, files, owners, readers, window_bytes)
        self._sending = _Buffer()
        self._receiving = _Buffer()
        self._windows = (_Buffer(), _Buffer())
        self._counting = threading.Lock()
        self._writer: InOrderWriter | None = None
        self._written: Future[None] | None = None

    def run(self, on_written: Callable[[int], None]) -> None:
        """Write all files; errors are the same on all ranks."""
        with ThreadPoolExecutor(1, "fsdp_ckpt-put") as putting:
            try:
                for number, (round_, fill) in enumerate(self._planned()):
                    self._read(round_, fill)
                    self._exchange(round_)
                    if self._group.rank in round_.windows:
                        window = round_.windows[self._group.rank]
                        data = self._assemble(round_, window, self._windows[number % 2])
                        self._start_put(putting, window, data)
                    on_written(sum(w.stop - w.start for w in round_.windows.values()))
                self._group.run("writing", lambda: self._check_written(is_end=True))
            except BaseException:
                self._drop()
                raise

    def _planned(self) -> Iterator[tuple[Round, Fill]]:
        """Yield each round when the one after it is planned, so that a segment that it needs stays."""
        planned = ((round_, self._plan_reads(round_)) for round_ in self._rounds)
        for this, _ in pairwise(chain(planned, [None])):
            if this is not None:
                yield this

    def _plan_reads(self, round_: Round) -> Fill:
        at = 0
        wants: list[Want] = []
        for owner in sorted(round_.windows):
            pieces = round_.pieces.get((self._group.rank, owner), [])
            wants += [replace(p, byte_offset=at + p.byte_offset) for p, _ in pieces]
            at += _aligned(round_.sent_bytes(self._group.rank, owner))
        fill = plan_fill(self._plan.checkpoint, wants, self._segments.segment_bytes)
        self._segments.expect(fill)
        return fill

    def _read(self, round_: Round, fill: Fill) -> None:
        """Read what this rank sends; all ranks agree that they have it."""
        rank = self._group.rank
        buffer = self._sending.take(
            sum(_aligned(round_.sent_bytes(rank, owner)) for owner in round_.windows)
        )

        def read() -> dict[str, int]:
            overflows: Counter[str] = Counter()

            def copy(key: SegmentKey) -> None:
                with self._segments.using(key) as segment:
                    found = copy_parts(fill[key], segment, buffer)
                with self._counting:
                    overflows.update(found)

            run_all((partial(copy, key) for key in fill), self._options.num_threads)
            self._check_written(is_end=False)
            return dict(overflows)

        def combine(found: list[dict[str, int]]) -> dict[str, int]:
            return dict(sum(map(Counter, found), Counter()))

        overflows = self._group.decide("reading", read, combine)
        if not self._options.allow_overflow:
            refuse_overflows(Counter(overflows), self._plan)

    def _exchange(self, round_: Round) -> None:
        """Send pieces to the owners of the windows, and receive those of this rank's."""
        rank, works, at = self._group.rank, [], 0
        incoming = [
            (reader, round_.sent_bytes(reader, rank)) for reader in range(self._group.world_size)
        ]
        into = self._receiving.take(sum(_aligned(n) for _, n in incoming))
        try:
            for reader, num_bytes in incoming:
                if num_bytes and reader != rank:
                    place = _tensor(into, at, num_bytes)
                    works.append(dist.irecv(place, reader, group=self._data_group))
                at += _aligned(num_bytes)
            at = 0
            for owner in sorted(round_.windows):
                num_bytes = round_.sent_bytes(rank, owner)
                if num_bytes and owner != rank:
                    part = _tensor(self._sending.held, at, num_bytes)
                    works.append(dist.isend(part, owner, group=self._data_group))
                at += _aligned(num_bytes)
            for work in works:
                if work is not None:
                    work.wait()
        except RuntimeError as e:  # gloo's errors are
            raise RankFailureError(f"an exchange between ranks failed: {describe(e)}") from e

    def _assemble(self, round_: Round, window: Window, buffer: _Buffer) -> memoryview:
        """Put the received pieces into this rank's window."""
        data = buffer.take(window.stop - window.start)
        header = window.file.header[window.start : window.stop]
        data[: len(header)] = header
        for reader, source in self._sources(round_):
            for piece, want in round_.pieces.get((reader, self._group.rank), []):
                place = relative_slices(piece.box, want.box)
                want.target(data)[place] = piece.target(source)
        return data

    def _sources(self, round_: Round) -> Iterator[tuple[int, memoryview]]:
        """Yield where each reader's pieces for this rank are."""
        rank, at = self._group.rank, 0
        for reader in range(self._group.world_size):
            num_bytes = round_.sent_bytes(reader, rank)
            if reader == rank:
                before = [o for o in sorted(round_.windows) if o < rank]
                start = sum(_aligned(round_.sent_bytes(rank, owner)) for owner in before)
                yield reader, self._sending.held[start:]
            else:
                yield reader, self._receiving.held[at:]
            at += _aligned(num_bytes)

    def _put(self, window: Window, data: memoryview) -> None:
        file = window.file
        if self._writer is None:
            writer = self._output.write(file.name, file.num_bytes)
            self._writer = InOrderWriter(writer, file.num_bytes, self._options.num_threads)
        self._writer.write_at(window.start, data)
        if window.stop == file.num_bytes:
            self._writer.commit()
            self._writer = None

    def _start_put(self, putting: ThreadPoolExecutor, window: Window, data: memoryview) -> None:
        """Write a window in the background, once the one before is written: its buffer is the next one's."""
        if self._written is not None and self._written.exception() is not None:
            return  # raised where all ranks agree, in the next round
        self._written = putting.submit(self._put, window, data)

    def _check_written(self, *, is_end: bool) -> None:
        if self._written is not None and (is_end or self._written.done()):
            self._written.result()

    def _drop(self) -> None:
        """Drop the file that is not whole, before the coordinator looks at what is."""
        if self._written is not None:
            wait([self._written])
        if self._writer is not None:
            with suppress(CheckpointError):  # the first error is the one to know
                self._writer.abort()


class _Buffer:
    """Memory that grows to what is asked of it, and is used again."""

    def __init__(self) -> None:
        self.held = memoryview(b"")

    def take(self, num_bytes: int) -> memoryview:
        if len(self.held) < num_bytes:
            self.held = memoryview(mmap.mmap(-1, num_bytes))
        return self.held[:num_bytes]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 8) * 8


def _tensor(memory: memoryview, start: int, num_bytes: int) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=start)
