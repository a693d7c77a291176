"""The writer leaves the processor to training, once training goes on."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from fsdp_ckpt.storage.local import LocalStore
from fsdp_ckpt.storage.shard_io import WRITE_BYTES
from fsdp_ckpt.storage.store import Store
from fsdp_ckpt.writer import FileName, ProcessWriter, WriteJob
from fsdp_ckpt.writer.handover import Handover
from fsdp_ckpt.writer.job import NO_DIGEST, run_job
from tests.local_files import PAGE, image_of

PATIENCE_S = 60.0
NUM_BYTES = PAGE + 4 * WRITE_BYTES
NAME = FileName("shard", digests_at=0)
JOB = WriteJob(
    num_bytes=NUM_BYTES, data_offset=PAGE, block_bytes=WRITE_BYTES, num_threads=2, url=""
)


class WatchedStore(LocalStore):
    """Says when it has been given so many bytes."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.begun = threading.Event()

    def write(self, key: str, num_bytes: int):  # type: ignore[no-untyped-def]
        writer = super().write(key, num_bytes)
        function = writer.write_at

        def write_at(byte_offset: int, data: memoryview) -> None:
            function(byte_offset, data)
            self.begun.set()

        writer.write_at = write_at  # type: ignore[method-assign]
        return writer


def test_threads_stand_back_when_all_is_filled(tmp_path: Path) -> None:
    """Those that put and those that digest; not before, while training waits for the copy."""
    store, handover = WatchedStore(str(tmp_path)), Handover(NAME)
    image = image_of(NUM_BYTES)
    image[: 4 * len(NO_DIGEST)] = NO_DIGEST.encode() * 4
    handover.filled(PAGE + WRITE_BYTES)
    stood_back: list[str] = []

    def stand_back() -> None:
        stood_back.append(threading.current_thread().name)

    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(run_job, JOB, image, store, handover, stand_back)
        assert store.begun.wait(PATIENCE_S)
        assert stood_back == []
        handover.filled(NUM_BYTES)
        done.result(PATIENCE_S)
    assert len(stood_back) >= 4  # three parts, and the digests
    assert all(name.startswith("fsdp_ckpt-io") for name in stood_back)


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_what_takes_processor_time_stands_back_as_a_whole(tmp_path: Path, kind: str) -> None:
    """A client of a remote store has threads of its own; local files are written by the kernel."""
    url = str(tmp_path) if kind == "local" else "memory://priority"
    store: Store = LocalStore(str(tmp_path))
    fd = os.memfd_create("image")
    os.truncate(fd, NUM_BYTES)
    job = WriteJob(**(JOB.to_json() | {"url": url}))
    writer = ProcessWriter()
    pending = writer.submit(job, memoryview(b""), fd, store, NAME)
    pending.filled(NUM_BYTES)
    wait([pending.future], PATIENCE_S)
    pending.future.result(0)
    pid, own = writer.pid, os.getpriority(os.PRIO_PROCESS, 0)
    found = {os.getpriority(os.PRIO_PROCESS, int(task)) for task in os.listdir(f"/proc/{pid}/task")}
    assert found == ({own} if kind == "local" else {own + 10})
    writer.close()
    os.close(fd)
