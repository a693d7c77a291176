"""The writer process: persists images for one rank, and outlives it as long as it has something to finish.

    python -m fsdp_ckpt.writer FD        started by fsdp_ckpt.writer.process

Messages in: ``write`` (id, job, name or null; with the image's descriptor), ``name`` (id, name),
``filled`` (id, bytes), ``fail`` (id, error).
Messages out: ``done`` (id, digest), ``failed`` (id, error).

When the trainer is gone the socket ends: images that are filled are persisted, the others given up.

Training comes first, for the processor and for the disk. But as long as an image is being filled training
stands still, and a disk that waits for someone to give it work makes that no shorter.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import signal
import socket
import sys
import threading
from contextlib import suppress
from typing import Any, TypeAlias

from fsdp_ckpt.errors import StorageError, error_to_json
from fsdp_ckpt.storage.local import LocalStore
from fsdp_ckpt.writer.channel import Channel
from fsdp_ckpt.writer.handover import FileName, Handover
from fsdp_ckpt.writer.job import WriteJob, run_job

__all__ = ["main"]

Jobs: TypeAlias = "queue.SimpleQueue[tuple[int, WriteJob, int, Handover] | None]"

MAX_QUEUED = 1000
MAX_MAPPED = 2
# Of threads that stand back: above that of the trainer, which this process begins with.
NICENESS = min(os.getpriority(os.PRIO_PROCESS, 0) + 10, 19)
# ioprio_set(2): this process, best effort, the lowest level.
_SYS_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_BEST_EFFORT_LOWEST = (2 << 13) | 7


def main(arguments: list[str]) -> int:
    """Serve the trainer at the other end of descriptor ``arguments[0]`` until it is gone."""
    channel = Channel(socket.socket(fileno=int(arguments[0])))
    _lower_io_priority()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # of a session that ends with the trainer
    jobs: Jobs = queue.SimpleQueue()
    worker = threading.Thread(target=_work, args=(channel, jobs), name="fsdp_ckpt-jobs")
    worker.start()
    handovers: dict[int, Handover] = {}
    try:
        while received := channel.receive():
            _take(*received, channel, jobs, handovers)
    finally:
        for handover in handovers.values():  # those that are filled do not care
            handover.fail(StorageError("the training process is gone"))
        jobs.put(None)
        worker.join()
    return 0


def _take(
    message: dict[str, Any],
    fd: int | None,
    channel: Channel,
    jobs: Jobs,
    handovers: dict[int, Handover],
) -> None:
    """Act on one message."""
    number, kind = message["id"], message["kind"]
    if kind == "write" and fd is None:
        error = StorageError("the image's descriptor did not arrive; too many open files?")
        channel.send({"kind": "failed", "id": number, "error": error_to_json(error)})
    elif kind == "write" and fd is not None:
        name = message["name"]
        handovers[number] = Handover(None if name is None else FileName(*name))
        jobs.put((number, WriteJob(**message["job"]), fd, handovers[number]))
        # Jobs are done in order: what is not among the newest has ended.
        handovers.pop(number - MAX_QUEUED, None)
    elif number not in handovers:
        return  # of a job that was not taken; who sent it knows
    elif kind == "filled":
        handovers[number].filled(message["bytes"])
    elif kind == "name":
        handovers[number].name(FileName(*message["name"]))
    else:
        handovers[number].fail(StorageError(message["error"]))


def _work(channel: Channel, jobs: Jobs) -> None:
    images = _Images()
    while item := jobs.get():
        number, job, fd, handover = item
        try:
            image = images.view(fd)[: job.num_bytes]
            store = job.open_store()
            if not isinstance(store, LocalStore):
                # Its client takes processor time, in threads of its own.
                _stand_back(all_threads=True)
            digest = run_job(job, image, store, handover, _stand_back)
            answer = {"kind": "done", "id": number, "digest": digest}
        except Exception as e:  # whatever it is, the trainer must hear of it
            answer = {"kind": "failed", "id": number, "error": error_to_json(e)}
        finally:
            os.close(fd)
        with suppress(OSError):  # no one is there to hear it
            channel.send(answer)


class _Images:
    """The trainer's images as memory of this process: those of the last jobs stay mapped.

    To map one anew costs a page fault for every few pages, while the trainer copies.
    """

    def __init__(self) -> None:
        self._views: dict[int, memoryview] = {}  # by inode, the last used at the end

    def view(self, fd: int) -> memoryview:
        """Return the memory behind ``fd``."""
        status = os.fstat(fd)
        view = self._views.pop(status.st_ino, None)
        if view is None:
            view = memoryview(mmap.mmap(fd, status.st_size))
        self._views[status.st_ino] = view
        while len(self._views) > MAX_MAPPED:
            del self._views[next(iter(self._views))]
        return view


def _stand_back(*, all_threads: bool = False) -> None:
    """Let training have the processor; there is no way back, nor need of one: each image has new threads."""
    threads = os.listdir("/proc/self/task") if all_threads else [threading.get_native_id()]
    for thread in map(int, threads):
        with suppress(ProcessLookupError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, thread, NICENESS)


def _lower_io_priority() -> None:
    """Of this thread, and of those that it will start."""
    number = _SYS_IOPRIO_SET.get(os.uname().machine)
    if number is not None:
        ctypes.CDLL(None).syscall(number, 1, 0, _BEST_EFFORT_LOWEST)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
