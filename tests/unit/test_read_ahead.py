"""A rank's own file is read before it is known what of it is wanted, and nothing comes of it but time."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_ckpt import CheckpointManager, CorruptCheckpointError, MismatchError, TrainState
from fsdp_ckpt.dcp import read_memory
from fsdp_ckpt.errors import StorageError
from fsdp_ckpt.snapshot.buffer import HostBuffer, ImagePool
from fsdp_ckpt.storage import read_ahead, shard_io
from fsdp_ckpt.storage.local import LocalStore
from fsdp_ckpt.storage.open import open_store
from fsdp_ckpt.storage.read_ahead import ReadAhead
from fsdp_ckpt.testing import Fault, FaultPlan, FaultStore

BLOCK = 4
HEADER = 3
DATA = bytes(range(40))


class GatedStore(LocalStore):
    """Local files whose reads of more than the header wait at a gate, and are noted."""

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


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GatedStore:
    """Return a store with a file of ten blocks; parts of two blocks are read at a time."""
    monkeypatch.setattr(shard_io, "READ_BYTES", 2 * BLOCK)
    (tmp_path / "file").write_bytes(b"h" * HEADER + DATA)
    return GatedStore(tmp_path)


def begin(store: GatedStore) -> ReadAhead:
    """Return what reads ahead by two threads, once both of them have begun."""
    ahead = ReadAhead(
        store, "file", HEADER, memoryview(bytearray(len(DATA))), block_bytes=BLOCK, num_threads=2
    )
    for _ in range(2):
        assert store.has_begun.acquire(timeout=250)
    return ahead


def test_what_has_begun_is_waited_for_and_the_rest_read_as_asked(store: GatedStore) -> None:
    """A range over a part that has begun and one that has not; beyond it nothing is read."""
    ahead = begin(store)
    filling = threading.Thread(target=ahead.fill, args=(12, 20))
    filling.start()
    # What the range has of the third part, by the thread that asked, which had to wait for the second one.
    ahead.stop()
    store.gate.set()
    filling.join(250)
    ahead.close()
    assert sorted(store.begun) == [(0, 8), (8, 16), (16, 20)]
    assert ahead.data == DATA[:20] + bytes(20)


def test_who_asks_while_another_one_stops_it_waits_for_that(store: GatedStore) -> None:
    """Two ranges of a part that is being given up: both are read, neither waits for what never comes."""
    ahead = begin(store)
    _, _, part = ahead._parts[2]
    cancel, is_stopping, go_on = part.cancel, threading.Event(), threading.Event()
    is_given_up = threading.Event()

    def slowly() -> bool:
        is_stopping.set()
        assert go_on.wait(250)
        done = cancel()
        is_given_up.set()
        return done

    part.cancel = slowly  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(ahead.fill, 16, 20)
        assert is_stopping.wait(250)
        second = threads.submit(ahead.fill, 20, 24)
        # Time to go wrong in: right is to wait.
        assert wait([second], 0.05).done == set()
        go_on.set()
        assert is_given_up.wait(250)  # before a thread is free to begin with it
        store.gate.set()
        first.result(250)
        second.result(250)
    ahead.close()
    assert part.cancelled()
    assert ahead.data[16:24] == DATA[16:24]


def test_all_of_it_is_there_when_nobody_asks(store: GatedStore) -> None:
    """Reading ahead needs no one, and ends with the file."""
    store.gate.set()
    ahead = begin(store)
    for _ in range(3):
        assert store.has_begun.acquire(timeout=250)
    ahead.fill(0, len(DATA))
    ahead.close()
    assert ahead.data == DATA
    assert sorted(store.begun) == [(at, at + 8) for at in range(0, 40, 8)]


def test_after_close_nothing_is_written(store: GatedStore) -> None:
    """Close waits for what has begun, and begins no more."""
    ahead = begin(store)
    closing = threading.Thread(target=ahead.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    ahead.stop()  # in case that thread has not come so far
    store.gate.set()
    closing.join(250)
    assert len(store.begun) == 2
    assert ahead.data == DATA[:16] + bytes(24)


def test_only_who_wants_it_learns_of_a_failure(store: GatedStore) -> None:
    """A part that cannot be read is an error for its range alone."""
    store.gate.set()
    plan = FaultPlan(Fault("fail", verbs=("read_into",), nth=1))
    with plan:
        ahead = ReadAhead(
            FaultStore(store, plan),
            "file",
            HEADER,
            memoryview(bytearray(len(DATA))),
            block_bytes=BLOCK,
            num_threads=1,
        )
        assert store.has_begun.acquire(timeout=250)
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
def aheads(monkeypatch: pytest.MonkeyPatch) -> list[ReadAhead]:
    """Return what read ahead; small files count, and are read in parts of a block."""
    made: list[ReadAhead] = []

    class Noted(ReadAhead):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(read_memory, "LEAST_AHEAD_BYTES", 1)
    monkeypatch.setattr(read_memory, "ReadAhead", Noted)
    return made


def test_a_restore_takes_what_was_read_ahead(tmp_path: Path, aheads: list[ReadAhead]) -> None:
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
    tmp_path: Path, aheads: list[ReadAhead], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool's one buffer, touched by the save, takes it all: none is acquired for nothing."""
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
    assert read == [len(ahead.data) for ahead in aheads]
    assert 2 * 10_000 <= read[0] <= saved


def test_a_part_of_the_file_can_be_all_that_is_wanted(
    tmp_path: Path, aheads: list[ReadAhead]
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


def test_damage_in_what_was_read_ahead_is_named(tmp_path: Path, aheads: list[ReadAhead]) -> None:
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
    tmp_path: Path, aheads: list[ReadAhead]
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
    monkeypatch.setattr(read_ahead.ReadAhead, "_read", lambda *args: pytest.fail("read ahead"))
    job = Job(tmp_path, "a")
    job.manager.save(mode="sync")
    job.manager.restore()
    job.manager.close()
