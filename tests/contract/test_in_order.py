"""Consecutive ranges of any length reach any writer as it wants them."""

from __future__ import annotations

import random
import threading

import pytest

from fsdp_ckpt.errors import StorageError
from fsdp_ckpt.storage.in_order import InOrderWriter

DATA = random.Random(0).randbytes(10_000)


class PartsWriter:
    """Takes parts as the store protocol says, or consecutive ranges, and refuses everything else."""

    def __init__(self, num_bytes: int, *, part_bytes: int, ordered: bool) -> None:
        self.part_bytes, self.ordered = part_bytes, ordered
        self.content = bytearray(num_bytes)
        self.written = 0
        self.ended: list[str] = []
        self._lock = threading.Lock()

    def write_at(self, byte_offset: int, data: memoryview) -> None:
        with self._lock:
            if self.part_bytes:
                assert byte_offset % self.part_bytes == 0
                assert len(data) == min(self.part_bytes, len(self.content) - byte_offset)
            if self.ordered:
                assert byte_offset == self.written
            self.content[byte_offset : byte_offset + len(data)] = data
            self.written += len(data)

    def flush(self) -> None:
        self.ended.append("flush")

    def commit(self) -> None:
        self.ended.append("commit")

    def abort(self) -> None:
        self.ended.append("abort")


def write_in_order(writer: InOrderWriter, data: bytes, lengths: list[int]) -> None:
    at = 0
    for length in lengths:
        buffer = bytearray(data[at : at + length])
        writer.write_at(at, memoryview(buffer))
        buffer[:] = bytes(len(buffer))  # the caller may use it again
        at += length
    assert at == len(data)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("part_bytes", [0, 1, 7, 1000, 9999, 10_000, 20_000])
@pytest.mark.parametrize("num_bytes", [0, 1, 1000, 10_000])
@pytest.mark.parametrize("seed", range(4))
def test_any_lengths_arrive(num_bytes: int, part_bytes: int, ordered: bool, seed: int) -> None:
    """The bytes are the same however they are cut, on both sides."""
    draw = random.Random(seed)
    data, lengths = DATA[:num_bytes], []
    while (left := num_bytes - sum(lengths)) > 0:
        lengths.append(min(draw.choice([0, 1, 6, 7, 8, 999, 1000, 3001, 12_000]), left))
    inner = PartsWriter(num_bytes, part_bytes=part_bytes, ordered=ordered)
    writer = InOrderWriter(inner, num_bytes, num_threads=3)
    write_in_order(writer, data, lengths)
    writer.commit()
    assert inner.content == data
    assert inner.written == num_bytes
    assert inner.ended == ["commit"]


@pytest.mark.parametrize(("byte_offset", "length"), [(1, 5), (0, 10_001), (2**40, 1)])
def test_what_is_out_of_order_is_refused(byte_offset: int, length: int) -> None:
    """Ranges that leave a gap or go past the end are errors, and nothing of them is written."""
    inner = PartsWriter(10_000, part_bytes=0, ordered=False)
    with pytest.raises(StorageError, match="out of order"):
        InOrderWriter(inner, 10_000).write_at(byte_offset, memoryview(bytes(length)))
    assert inner.written == 0


def test_a_short_object_is_not_committed() -> None:
    """Bytes that were promised and never came fail the commit."""
    inner = PartsWriter(10_000, part_bytes=1000, ordered=False)
    writer = InOrderWriter(inner, 10_000)
    writer.write_at(0, memoryview(DATA)[:9999])
    with pytest.raises(StorageError, match="9999 of 10000 bytes"):
        writer.commit()
    assert inner.ended == []
    writer.flush()
    writer.abort()
    assert inner.ended == ["flush", "abort"]
