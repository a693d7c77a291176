"""What a store can do: one verb each.

Keys are relative to the store's root, with ``/`` between their parts. Every error is of our tree:
:class:`NotFoundError` for an absent key, :class:`AlreadyCommittedError` for a create-only write that lost,
:class:`StorageError` for the rest.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, runtime_checkable

from fsdp_ckpt.errors import CorruptCheckpointError, StorageError

__all__ = [
    "BulkLister",
    "LateNaming",
    "NameRefusedError",
    "ObjectWriter",
    "Store",
    "UnnamedWriter",
    "refuse_larger",
]


class NameRefusedError(StorageError):
    """What was written without a name cannot get one; it can still be written anew under it."""


class ObjectWriter(Protocol):
    """One new object being written. Ends with exactly one of ``commit`` and ``abort``."""

    @property
    def ordered(self) -> bool:
        """Whether bytes must come in order; otherwise in any order, from any thread."""
        ...

    @property
    def part_bytes(self) -> int:
        """Size of the parts that ``write_at`` takes, each starting at a multiple of it; 0 for any range."""
        ...

    def write_at(self, byte_offset: int, data: memoryview) -> None:
        """Write all of ``data`` at ``byte_offset``; the buffer may be reused afterwards."""
        ...

    def flush(self) -> None:
        """Make what was written durable before anything that is written later, where the store can."""
        ...

    def commit(self) -> None:
        """Make the object durable and visible under its key."""
        ...

    def abort(self) -> None:
        """Drop what was written: no object stays under the key."""
        ...


class UnnamedWriter(ObjectWriter, Protocol):
    """One new object that no one can see until it is named; ``commit`` comes after that."""

    def name(self, key: str) -> None:
        """Put the object under its key, which must not exist; once, from any thread.

        Raises:
            NameRefusedError: The store cannot.
        """
        ...


@runtime_checkable
class Store(Protocol):
    """A place for objects under one root."""

    @property
    def url(self) -> str:
        """The root as the user would write it; without credentials."""
        ...

    @property
    def concurrency(self) -> int:
        """Reads or writes of one rank in flight with which this store is fastest."""
        ...

    @property
    def read_bytes(self) -> int:
        """Bytes of a large range that one read asks for."""
        ...

    @property
    def gap_bytes(self) -> int:
        """Bytes that nobody wants between two ranges, up to which one read of both is faster than two."""
        ...

    def child(self, key: str) -> Store:
        """Return the store rooted at ``key``."""
        ...

    def write(self, key: str, num_bytes: int) -> ObjectWriter:
        """Start a new object of ``num_bytes``. The key must not exist."""
        ...

    def create(self, key: str, data: bytes) -> None:
        """Write a small object, durably and all at once, only if the key does not exist."""
        ...

    def read(self, key: str, max_bytes: int | None = None) -> bytes:
        """Return the whole object, as it is on storage now.

        One of more than ``max_bytes`` is a CorruptCheckpointError, before any of it is in memory.
        """
        ...

    def read_into(self, key: str, byte_offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes from ``byte_offset`` on; a shorter object is a StorageError."""
        ...

    def size(self, key: str) -> int:
        """Return the object's size in bytes."""
        ...

    def list_folders(self) -> list[str]:
        """Return the names of the folders directly under the root, sorted; none for an absent root."""
        ...

    def list_files(self) -> dict[str, int]:
        """Return name → bytes of the objects directly under the root; none for an absent root."""
        ...

    def delete(self, key: str) -> None:
        """Remove one object; an absent key is not an error."""
        ...


@runtime_checkable
class LateNaming(Protocol):
    """A store that takes a new object's bytes before its key is known."""

    def write_unnamed(self, num_bytes: int) -> UnnamedWriter | None:
        """Start a new object of ``num_bytes``; ``None`` where it has to be written under its key."""
        ...


@runtime_checkable
class BulkLister(Protocol):
    """A store that lists many folders in fewer requests than one each."""

    def list_level(self) -> tuple[list[str], dict[str, int]]:
        """Return what ``list_folders`` and ``list_files`` do, at once."""
        ...

    def list_trees(self, folders: Collection[str]) -> dict[str, dict[str, int]]:
        """Return folder → key relative to it → bytes, of everything in folders directly under the root."""
        ...


def refuse_larger(num_bytes: int, max_bytes: int | None, url: str, key: str) -> None:
    """Raise where an object of ``num_bytes`` is larger than whoever reads it expects.

    Raises:
        CorruptCheckpointError: It is.
    """
    if max_bytes is not None and num_bytes > max_bytes:
        raise CorruptCheckpointError(
            f"{url}/{key}: {num_bytes} bytes, at most {max_bytes} expected", key=key
        )
