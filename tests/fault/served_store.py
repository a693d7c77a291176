"""A store that lives in another process than the one that uses it, so that it outlives a crash of that one.

Store verbs travel over a Unix socket, one connection per thread of the client; the objects being written stay
with the server, half-written as they are, when the client dies.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from fsdp_ckpt.storage.store import ObjectWriter, Store

__all__ = ["ServedStore", "serve_store"]


def serve_store(store: Store, address: str) -> None:
    """Serve ``store`` on a Unix socket, from threads of this process, until it ends."""
    listener = Listener(address, "AF_UNIX")

    def accept() -> None:
        while True:
            connection = listener.accept()
            threading.Thread(target=_serve, args=(store, connection), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


# Objects being written: any connection may go on with them.
_writers: dict[int, ObjectWriter] = {}
_numbers = itertools.count()


def _serve(store: Store, connection: Connection) -> None:
    while True:
        try:
            folder, verb, *args = connection.recv()
        except EOFError:  # the client ended, or died
            return
        try:
            answer = _act(store.child(folder) if folder else store, verb, args)
        except BaseException as e:
            answer = e
        connection.send(answer)


def _act(store: Store, verb: str, args: list[Any]) -> Any:
    if verb == "write":
        writer = store.write(*args)
        number = next(_numbers)
        _writers[number] = writer
        return number, writer.ordered, writer.part_bytes
    if verb == "read_into":
        buffer = bytearray(args[2])
        store.read_into(args[0], args[1], memoryview(buffer))
        return bytes(buffer)
    if verb in ("write_at", "flush", "commit", "abort"):
        return getattr(_writers[args[0]], verb)(*args[1:])
    return getattr(store, verb)(*args)


@dataclass(frozen=True, slots=True)
class ServedStore:
    """The client's side.

    Args:
        address: Of :func:`serve_store`.
        folder: Below the served root.
    """

    address: str
    folder: str = ""
    concurrency: int = 2
    read_bytes: int = 16 * 1024 * 1024
    gap_bytes: int = 0
    _local: threading.local = field(default_factory=threading.local)

    @property
    def url(self) -> str:
        """A name for messages."""
        return f"served://{self.folder}"

    def call(self, verb: str, *args: Any) -> Any:
        """Have one verb done, and return or raise what it did."""
        if not hasattr(self._local, "connection"):
            self._local.connection = Client(self.address, "AF_UNIX")
        self._local.connection.send((self.folder, verb, *args))
        answer = self._local.connection.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def child(self, key: str) -> ServedStore:
        """Return the store rooted at ``key``."""
        return ServedStore(self.address, f"{self.folder}/{key}".strip("/"))

    def write(self, key: str, num_bytes: int) -> ServedWriter:
        """Start a new object."""
        return ServedWriter(self.call, *self.call("write", key, num_bytes))

    def create(self, key: str, data: bytes) -> None:
        """Write a small object if the key does not exist."""
        self.call("create", key, bytes(data))

    def read(self, key: str, max_bytes: int | None = None) -> bytes:
        """Return the whole object."""
        data: bytes = self.call("read", key, max_bytes)
        return data

    def read_into(self, key: str, byte_offset: int, buffer: memoryview) -> None:
        """Fill ``buffer``."""
        buffer[:] = self.call("read_into", key, byte_offset, len(buffer))

    def size(self, key: str) -> int:
        """Return the object's size in bytes."""
        return int(self.call("size", key))

    def list_folders(self) -> list[str]:
        """Return the names of the folders."""
        return list(self.call("list_folders"))

    def list_files(self) -> dict[str, int]:
        """Return name → bytes of the objects."""
        return dict(self.call("list_files"))

    def delete(self, key: str) -> None:
        """Remove one object."""
        self.call("delete", key)


@dataclass(frozen=True, slots=True)
class ServedWriter:
    """One new object, on the server."""

    call: Callable[..., Any]
    number: int
    ordered: bool
    part_bytes: int

    def write_at(self, byte_offset: int, data: memoryview) -> None:
        """Send ``data`` and have it written."""
        self.call("write_at", self.number, byte_offset, bytes(data))

    def flush(self) -> None:
        """Flush."""
        self.call("flush", self.number)

    def commit(self) -> None:
        """Commit."""
        self.call("commit", self.number)

    def abort(self) -> None:
        """Abort."""
        self.call("abort", self.number)
