"""A rank's own file is read before it is known what of it is wanted, and nothing comes of it but time."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fsdp_ckpt import CheckpointManager, CorruptCheckpointError, MismatchError, TrainState
from fsdp_ckpt.dcp import read_memory
from fsdp_ckpt.errors import StorageError
from fsdp_ckpt.snapshot.buffer import HostBuffer, ImagePool
from fsdp_ckpt.storage.at_hand import Reading
from fsdp_ckpt.storage.local import LocalStore
from fsdp_ckpt.storage.open import open_store
from fsdp_ckpt.storage.store import Store
from fsdp_ckpt.testing import Fault, FaultPlan, FaultStore

BLOCK = 4
HEADER = 3
DATA = bytes(range(40))


class GatedStore(LocalStore):
    """Local files whose reads of more than the header wait at a gate, and are noted."""

    read_bytes = 2 * BLOCK

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.begun: list[tuple[int, int]] = []
        self.has_begun = threading.Semaphore(0)
        self.gate = threading.Event()

    def read_into(self, key: str, byte_offset: int, buffer: memoryview) -> None:
        self.begun.append((byte_offset - HEADER, byte_offset - HEADER + len(buffer)))
        self.has_begun.release()
        assert self.gate.wait(250)
        super().read_into(key, byte_offset, buffer)


class CountingStore(LocalStore):
    """``DATA``; counts how often each byte is read. A read after so many others waits at a gate."""

    read_bytes = 2 * BLOCK

    def __init__(self, num_reads: int) -> None:
        super().__init__("/nowhere")
        self.counts = [0] * len(DATA)
        self.reached, self.gate = threading.Event(), threading.Event()
        self._num_left = num_reads

    def read_into(self, key: str, byte_offset: int, buffer: memoryview) -> None:
        for at in range(byte_offset, byte_offset + len(buffer)):
            self.counts[at] += 1
        if self._num_left == 0:
            self.reached.set()
            assert self.gate.wait(250)
        self._num_left -= 1
        buffer[:] = DATA[byte_offset : byte_offset + len(buffer)]
        if byte_offset + len(buffer) == len(DATA):
            self.reached.set()


@pytest.fixture
def store(tmp_path: Path) -> GatedStore:
    """Return a store with a file of ten blocks; parts of two blocks are read at a time."""
    (tmp_path / "file").write_bytes(b"h" * HEADER + DATA)
    return GatedStore(tmp_path)


class Ahead(Reading):
    """Reads ``DATA`` ahead by threads of its own."""

    def __init__(self, store: Store, data_offset: int, num_threads: int) -> None:
        self.own = ThreadPoolExecutor(num_threads)
        memory = memoryview(bytearray(len(DATA)))
        super().__init__(store, "file", data_offset, memory, block_bytes=BLOCK, threads=self.own)
        self.want([(0, len(DATA))])

    def close(self) -> None:
        self.own.shutdown(cancel_futures=True)


def begin(store: GatedStore) -> Ahead:
    """Return what reads ahead by two threads, once both of them have begun."""
    ahead = Ahead(store, HEADER, 2)
    for _ in range(2):
        assert store.has_begun.acquire(timeout=250)
    return ahead


def test_of_what_is_not_wanted_only_what_has_begun_is_read(store: GatedStore) -> None:
    """Two parts have begun; of the others what is wanted: a half of the third, and the last, as it was."""
    ahead = begin(store)
    ahead.want([(12, 20), (32, 40)])
    store.gate.set()
    ahead.fill(12, 20)
    ahead.fill(32, 40)
    ahead.close()
    assert sorted(store.begun) == [(0, 8), (8, 16), (16, 20), (32, 40)]
    assert ahead.data == DATA[:20] + bytes(12) + DATA[32:]


def test_who_asks_waits_for_all_parts_of_a_range(store: GatedStore) -> None:
    """Not for others: the range of a part that is there is there."""
    ahead = begin(store)
    ahead.want([(0, 40)])
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(ahead.fill, 4, 12)
        # Time to go wrong in: right is to wait.
        assert wait([first], 0.05).done == set()
        store.gate.set()
        first.result(250)
        threads.submit(ahead.fill, 36, 40).result(250)
    assert ahead.data[:16] == DATA[:16]
    assert ahead.data[32:] == DATA[32:]
    ahead.close()


@given(st.sets(st.integers(0, 10)), st.integers(0, 5))
def test_what_is_wanted_is_read_once(cuts: set[int], num_ahead: int) -> None:
    """Any ranges, any number of parts read ahead: what is wanted is there, and no byte is read twice."""
    edges = sorted(cuts)
    ranges = [(a * BLOCK, b * BLOCK) for a, b in zip(edges[::2], edges[1::2], strict=False)]
    store = CountingStore(num_ahead)
    ahead = Ahead(store, 0, 1)
    assert store.reached.wait(250)
    ahead.want(ranges)
    store.gate.set()
    for start, stop in ranges:
        ahead.fill(start, stop)
        assert ahead.data[start:stop] == DATA[start:stop]
    ahead.close()
    wanted = {at for start, stop in ranges for at in range(start, stop)}
    begun = set(range(min(2 * BLOCK * (num_ahead + 1), len(DATA))))
    assert store.counts == [int(at in wanted | begun) for at in range(len(DATA))]


def test_all_of_it_is_there_when_nobody_asks(store: GatedStore) -> None:
    """Reading ahead needs no one, and ends with the file."""
    store.gate.set()
    ahead = begin(store)
    ahead.fill(0, len(DATA))
    ahead.close()
    assert ahead.data == DATA
    assert sorted(store.begun) == [(at, at + 8) for at in range(0, 40, 8)]


def test_after_close_nothing_is_written(store: GatedStore) -> None:
    """Close waits for what has begun, and begins no more."""
    ahead = begin(store)
    are_cancelled = threading.Event()
    ahead._parts[-1].read.add_done_callback(lambda part: are_cancelled.set())
    closing = threading.Thread(target=ahead.close)
    closing.start()
    assert are_cancelled.wait(250)
    assert closing.is_alive()
    store.gate.set()
    closing.join(250)
    assert len(store.begun) == 2
    assert ahead.data == DATA[:16] + bytes(24)


def test_only_who_wants_it_learns_of_a_failure(store: GatedStore) -> None:
    """A part that cannot be read is an error for its range alone."""
    store.gate.set()
    plan = FaultPlan(Fault("fail", verbs=("read_into",), nth=1))
    with plan:
        ahead = Ahead(FaultStore(store, plan), HEADER, 1)
        assert store.has_begun.acquire(timeout=250)
        ahead.want([(4, 16)])
        ahead.fill(8, 16)
        with pytest.raises(StorageError):
            ahead.fill(4, 12)
        ahead.close()


# --- in a restore ---


class Job:
    """A model with a parameter for each name, 10 kB each."""

    def __init__(self, root: Any, *names: str) -> None:
        self.model = nn.Module()
        for name in names:
            self.model.register_parameter(name, nn.Parameter(torch.rand(2500)))
        self.manager = CheckpointManager(root, TrainState(model=self.model))


@pytest.fixture
def aheads(monkeypatch: pytest.MonkeyPatch) -> list[Reading]:
    """Return what read ahead; small files count, and are read in parts of a block."""
    made: list[Reading] = []

    class Noted(Reading):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(read_memory, "LEAST_AHEAD_BYTES", 1)
    monkeypatch.setattr(read_memory, "Reading", Noted)
    return made


def test_a_restore_takes_what_was_read_ahead(tmp_path: Path, aheads: list[Reading]) -> None:
    """To the bit; and once more, into memory that the first one has used."""
    job = Job(tmp_path, "a", "b")
    before = {name: p.detach().clone() for name, p in job.model.named_parameters()}
    job.manager.save(mode="sync")
    for _ in range(2):
        for parameter in job.model.parameters():
            parameter.data.fill_(7)
        job.manager.restore()
        assert all(torch.equal(p, before[name]) for name, p in job.model.named_parameters())
    job.manager.close()
    assert len(aheads) == 2


def test_one_buffer_is_enough_for_what_one_file_holds(
    tmp_path: Path, aheads: list[Reading], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool's one buffer takes it all, from save to restore and back: as large for either."""
    asked: list[int] = []
    acquire = ImagePool.acquire

    def noted(pool: ImagePool, num_bytes: int) -> HostBuffer:
        asked.append(num_bytes)
        return acquire(pool, num_bytes)

    monkeypatch.setattr(ImagePool, "acquire", noted)
    job = Job(tmp_path, "a", "b")
    job.manager.save(mode="sync")
    job.manager.restore()
    job.manager.close()
    saved, *read = asked
    assert read == [saved]
    assert [2 * 10_000 <= len(ahead.data) < saved for ahead in aheads] == [True]


def test_a_part_of_the_file_can_be_all_that_is_wanted(
    tmp_path: Path, aheads: list[Reading]
) -> None:
    """The rest of what was read ahead is let go."""
    job = Job(tmp_path, "a", "b", "c")
    job.manager.save(mode="sync")
    job.manager.close()
    less = Job(tmp_path, "b")
    report = less.manager.restore(allow_unexpected=["model.a", "model.c"])
    assert report.unexpected == ("model.a", "model.c")
    assert torch.equal(less.model.b, job.model.b)
    less.manager.close()
    assert len(aheads) == 1


def test_damage_in_what_was_read_ahead_is_named(tmp_path: Path, aheads: list[Reading]) -> None:
    """As in what was not; the live state stays."""
    job = Job(tmp_path, "a", "b")
    job.manager.save(mode="sync")
    (file,) = tmp_path.glob("*/*/*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    job.model.a.data.fill_(7)
    with pytest.raises(CorruptCheckpointError, match=r"model\.b"):
        job.manager.restore(0)
    assert torch.equal(job.model.a, torch.full((2500,), 7.0))
    job.manager.close()
    assert len(aheads) == 1


def test_a_state_that_does_not_fit_reads_nothing_ahead(
    tmp_path: Path, aheads: list[Reading]
) -> None:
    """The difference is found before: of the files no more than a header has been read."""
    job = Job(tmp_path, "a", "b")
    job.manager.save(mode="sync")
    job.manager.close()
    plan = FaultPlan()
    other = Job(FaultStore(open_store(tmp_path), plan), "a", "other")
    with pytest.raises(MismatchError, match="other"):
        other.manager.restore()
    other.manager.close()
    assert aheads == []
    assert [operation.verb for operation in plan.operations].count("read_into") <= 1


def test_small_files_are_not_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are there as soon as they are asked for."""
    monkeypatch.setattr(read_memory, "Reading", lambda *args, **kwargs: pytest.fail("read ahead"))
    job = Job(tmp_path, "a")
    job.manager.save(mode="sync")
    job.manager.restore()
    job.manager.close()
