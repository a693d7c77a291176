"""Persists images in another process: the trainer's own threads and interpreter stay free.

Invariant: every submitted write resolves: by the writer's answer, or because the writer is gone.

The process is started with the first write and again if it died. It is a plain ``python -m``, so the user's
program needs no ``__main__`` guard and no library is forked.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import weakref
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from fsdp_ckpt.errors import ClosedError, StorageError, describe, error_from_json
from fsdp_ckpt.storage.store import Store
from fsdp_ckpt.writer.channel import Channel
from fsdp_ckpt.writer.handover import FileName
from fsdp_ckpt.writer.job import WriteJob

__all__ = ["ProcessWriter"]

# How long a writer that has nothing left to do may take to end, in seconds.
END_TIMEOUT_S = 10.0

# The trainer may have found the package by a path that python -m does not look at.
PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class _PendingWrite:
    """A write in the other process."""

    def __init__(self, number: int, connection: _Connection) -> None:
        self.future: Future[str] = Future()
        self._number = number
        self._connection = connection

    def name(self, name: FileName) -> None:
        """Pass it on."""
        self._send("name", name=name)

    def filled(self, num_bytes: int) -> None:
        """Pass it on."""
        self._send("filled", bytes=num_bytes)

    def fail(self, error: BaseException) -> None:
        """Pass it on."""
        self._send("fail", error=describe(error))

    def _send(self, kind: str, **content: Any) -> None:
        with suppress(OSError):  # a writer that is gone has failed the future already
            self._connection.channel.send({"kind": kind, "id": self._number, **content})


class _Connection:
    """One life of the writer process."""

    def __init__(self) -> None:
        mine, other = Channel.pair()
        environment = dict(os.environ)
        paths = [PACKAGE_ROOT, *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        with other:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fsdp_ckpt.writer", str(other.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                env=environment,
                # A launcher that kills the trainer's process group leaves it alone: it ends by itself. Not a
                # session of its own, which the kernel would schedule as the trainer's equal (autogroups).
                process_group=0,
            )
        self.channel = Channel(mine)
        self.pending: dict[int, _PendingWrite] = {}
        self._lock = threading.Lock()
        self._gone = False
        _open_connections.add(self)
        threading.Thread(target=self._listen, name="fsdp_ckpt-writer", daemon=True).start()

    @property
    def is_alive(self) -> bool:
        """Whether writes may be sent."""
        return not self._gone and self.process.poll() is None

    def send(self, number: int, job: WriteJob, fd: int, name: FileName | None) -> _PendingWrite:
        """Send a job."""
        message = {"kind": "write", "id": number, "job": job.to_json(), "name": name}
        pending = _PendingWrite(number, self)
        with self._lock:
            self.pending[number] = pending
        try:
            self.channel.send(message, fd)
        except OSError as e:
            self._resolve(number, StorageError(f"the writer process takes no work: {describe(e)}"))
        return pending

    def _listen(self) -> None:
        while received := self.channel.receive():
            message, _ = received
            if message["kind"] == "done":
                self._resolve(message["id"], message["digest"])
            else:
                self._resolve(message["id"], error_from_json(message["error"]))
        self._gone = True
        code = self.process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        for number in list(self.pending):
            self._resolve(number, StorageError(f"the writer process {self.process.pid} {how}"))

    def _resolve(self, number: int, outcome: str | Exception) -> None:
        with self._lock:
            pending = self.pending.pop(number, None)
        if pending is None:
            return
        if isinstance(outcome, str):
            pending.future.set_result(outcome)
        else:
            pending.future.set_exception(outcome)

    def end(self) -> None:
        """Let the writer finish and end; kill one that does not."""
        with suppress(OSError):
            self.channel.end()
        try:
            self.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


_open_connections: weakref.WeakSet[_Connection] = weakref.WeakSet()


def _close_in_child() -> None:
    # A forked data worker that kept the trainer's end open would hide the trainer's death from the writer.
    for connection in list(_open_connections):
        connection.channel.close()


os.register_at_fork(after_in_child=_close_in_child)


class ProcessWriter:
    """Sends images to a writer process of its own."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._connection: _Connection | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The writer's process id, ``None`` before the first write."""
        return self._connection.process.pid if self._connection else None

    def submit(
        self,
        job: WriteJob,
        image: memoryview,
        fd: int,
        store: Store,
        name: FileName | None = None,
    ) -> _PendingWrite:
        """Start writing; see :class:`~fsdp_ckpt.writer.job.ShardWriter`."""
        if self._closed:
            raise ClosedError("the writer is closed")
        if self._connection is None or not self._connection.is_alive:
            self._connection = _Connection()
        return self._connection.send(next(self._numbers), job, fd, name)

    def kill(self) -> None:
        """Kill the writer process, whose writes then fail."""
        if self._connection is not None:
            self._connection.process.kill()

    def close(self) -> None:
        """Finish what was submitted and end the process."""
        self._closed = True
        if self._connection is not None:
            self._connection.end()
            self._connection = None
