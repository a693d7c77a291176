"""Any store, with the faults of a plan at its operations.

Invariant: every operation goes through one plan, also those of child stores and of objects being written;
beyond what the plan declares, nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fsdp_ckpt.storage.store import LateNaming, ObjectWriter, Store, UnnamedWriter
from fsdp_ckpt.testing.faults import FaultPlan, Operation, Verb

__all__ = ["FaultStore"]

T = TypeVar("T")


class FaultStore:
    """Any store, with faults.

    Args:
        store: What does the work.
        plan: Shared by the stores and objects that come out of this one.
        prefix: Key of ``store`` below the outermost store, with a slash at its end.
    """

    def __init__(self, store: Store, plan: FaultPlan, prefix: str = "") -> None:
        self._store = store
        self._plan = plan
        self._prefix = prefix

    @property
    def url(self) -> str:
        """The wrapped store's root."""
        return self._store.url

    @property
    def concurrency(self) -> int:
        """The wrapped store's."""
        return self._store.concurrency

    @property
    def read_bytes(self) -> int:
        """As of the wrapped store."""
        return self._store.read_bytes

    @property
    def gap_bytes(self) -> int:
        """As of the wrapped store."""
        return self._store.gap_bytes

    def child(self, key: str) -> FaultStore:
        """Return the store rooted at ``key``, under the same plan."""
        return FaultStore(self._store.child(key), self._plan, f"{self._prefix}{key}/")

    def _run(self, verb: Verb, key: str, act: Callable[[], T]) -> T:
        name = f"{self._prefix}{key}".rstrip("/")
        return self._plan.run(Operation(verb=verb, key=name), act, act)

    def write(self, key: str, num_bytes: int) -> FaultWriter:
        """Start a new object."""
        writer = self._run("write", key, lambda: self._store.write(key, num_bytes))
        return FaultWriter(writer, self._plan, f"{self._prefix}{key}")

    def write_unnamed(self, num_bytes: int) -> UnnamedFaultWriter | None:
        """Start a new object without a key, if the wrapped store can; its operations have none until then."""
        store = self._store
        if not isinstance(store, LateNaming):
            return None
        writer = self._run("write", "", lambda: store.write_unnamed(num_bytes))
        return None if writer is None else UnnamedFaultWriter(writer, self._plan, self._prefix)

    def create(self, key: str, data: bytes) -> None:
        """Write a small object if the key does not exist."""
        self._run("create", key, lambda: self._store.create(key, data))

    def read(self, key: str, max_bytes: int | None = None) -> bytes:
        """Return the whole object."""
        return self._run("read", key, lambda: self._store.read(key, max_bytes))

    def read_into(self, key: str, byte_offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes from ``byte_offset`` on."""
        self._run("read_into", key, lambda: self._store.read_into(key, byte_offset, buffer))

    def size(self, key: str) -> int:
        """Return the object's size in bytes."""
        return self._run("size", key, lambda: self._store.size(key))

    def list_folders(self) -> list[str]:
        """Return the names of the folders."""
        return self._run("list_folders", "", self._store.list_folders)

    def list_files(self) -> dict[str, int]:
        """Return name → bytes of the objects."""
        return self._run("list_files", "", self._store.list_files)

    def delete(self, key: str) -> None:
        """Remove one object."""
        self._run("delete", key, lambda: self._store.delete(key))


class FaultWriter:
    """One new object, with faults; made by :meth:`FaultStore.write`."""

    def __init__(self, writer: ObjectWriter, plan: FaultPlan, key: str) -> None:
        self._writer = writer
        self._plan = plan
        self._key = key

    @property
    def ordered(self) -> bool:
        """The wrapped writer's."""
        return self._writer.ordered

    @property
    def part_bytes(self) -> int:
        """The wrapped writer's."""
        return self._writer.part_bytes

    def _run(
        self, verb: Verb, act: Callable[[], None], act_half: Callable[[], None] | None = None
    ) -> None:
        self._plan.run(Operation(verb=verb, key=self._key), act, act_half or act)

    def write_at(self, byte_offset: int, data: memoryview) -> None:
        """Write all of ``data``, or half of it where it is torn: no part of a store that takes whole ones."""

        def act_half() -> None:
            if not self._writer.part_bytes:
                self._writer.write_at(byte_offset, data[: len(data) // 2])

        self._run("write_at", lambda: self._writer.write_at(byte_offset, data), act_half)

    def flush(self) -> None:
        """Make durable what was written."""
        self._run("flush", self._writer.flush)

    def commit(self) -> None:
        """Make the object durable and visible."""
        self._run("commit", self._writer.commit)

    def abort(self) -> None:
        """Drop what was written."""
        self._run("abort", self._writer.abort)


class UnnamedFaultWriter(FaultWriter):
    """One new object that is named later, with faults; made by :meth:`FaultStore.write_unnamed`."""

    def __init__(self, writer: UnnamedWriter, plan: FaultPlan, prefix: str) -> None:
        super().__init__(writer, plan, prefix.rstrip("/"))
        self._unnamed = writer
        self._prefix = prefix

    def name(self, key: str) -> None:
        """Put the object under its key."""
        self._key = f"{self._prefix}{key}"
        self._run("name", lambda: self._unnamed.name(key))
