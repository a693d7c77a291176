"""What a writer is asked to do, and how it does it.

    trainer                                       writer (a thread, or a process)
    submit(job, image) ─────────────────────────> opens the store, begins a file, waits for bytes
    copies tensors, filled(n), filled(n) ... ───> writes what is filled
    header with a hole in image[:data_offset]
    name(key) ──────────────────────────────────> puts the file under its key
    goes on copying, filled(n) ... ─────────────> goes on writing
    the digests that it has into the hole
    filled(all) ────────────────────────────────> takes the other digests, writes the rest
                                                  all digests into the hole, header last, durable
    result() <─────────────────────────────────── digest of the header

A store that takes no bytes without a key is opened early, and written to once the name is known.

Invariant: when ``result`` returns, the file is durable; when it raises, no file is there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, Protocol

from fsdp_ckpt.storage.local import LocalStore
from fsdp_ckpt.storage.open import open_store
from fsdp_ckpt.storage.shard_io import write_shard
from fsdp_ckpt.storage.store import LateNaming, NameRefusedError, ObjectWriter, Store
from fsdp_ckpt.writer.handover import FileName, Handover

__all__ = ["NO_DIGEST", "PendingWrite", "ShardWriter", "WriteJob", "run_job", "store_address"]

# Stands in the hole for a digest that the writer has to take. A block that has it is digested once more.
NO_DIGEST = "0" * 16


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteJob:
    """One shard file to be made from an image.

    Args:
        num_bytes: Size of the file.
        data_offset: Start of the data, in bytes; before it lies the header.
        block_bytes: Bytes per digest.
        num_threads: Threads that write; ``None`` as many as suit the store.
        url: Of the store, for a writer in another process.
        storage_options: Likewise.
    """

    num_bytes: int
    data_offset: int
    block_bytes: int
    num_threads: int | None = None
    url: str = ""
    storage_options: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    def open_store(self) -> Store:
        """Open the store in this process."""
        return open_store(self.url, **self.storage_options)


class PendingWrite(Protocol):
    """A file on its way."""

    @property
    def future(self) -> Future[str]:
        """Resolves to the digest of the header once the file is durable, or to what went wrong."""
        ...

    def name(self, name: FileName) -> None:
        """Say what the file is called, where that was not known at first; the header is in place."""
        ...

    def filled(self, num_bytes: int) -> None:
        """Say that the first ``num_bytes`` of the image are there."""
        ...

    def fail(self, error: BaseException) -> None:
        """Say that the rest of the image will not come; the write fails."""
        ...


class ShardWriter(Protocol):
    """Persists images, one after the other."""

    def submit(
        self,
        job: WriteJob,
        image: memoryview,
        fd: int,
        store: Store,
        name: FileName | None = None,
    ) -> PendingWrite:
        """Start writing ``image``, which must stay as it is until the future resolves.

        Args:
            job: What to write.
            image: The file's bytes.
            fd: Descriptor of the memory that ``image`` is the start of.
            store: Where to.
            name: Of the file, where it is known; its header is in place then.
        """
        ...

    def close(self) -> None:
        """Finish what was submitted and end; closing twice is fine."""
        ...


def run_job(
    job: WriteJob,
    image: memoryview,
    store: Store,
    handover: Handover,
    stand_back: Callable[[], None] = lambda: None,
) -> str:
    """Write the file; return the digest of its header.

    Args:
        job: What to write.
        image: The file's bytes.
        store: Where to.
        handover: What the trainer says of the image.
        stand_back: Called by threads that go on when all is filled, and the trainer does something else.

    Raises:
        CheckpointError: The store failed, or the image was not finished; no file is there.
    """

    @cache  # asked for each block
    def digests_at() -> int:
        return handover.wait_named().digests_at

    def known(block: int) -> str | None:
        at = digests_at() + block * len(NO_DIGEST)
        found = bytes(image[at : at + len(NO_DIGEST)]).decode()
        return None if found == NO_DIGEST else found

    def seal(digests: Sequence[str]) -> bytes:
        header = bytearray(image[: job.data_offset])
        filling = "".join(digests).encode()
        header[digests_at() : digests_at() + len(filling)] = filling
        return bytes(header)

    def wait_filled(num_bytes: int) -> None:
        handover.wait_filled(num_bytes)
        if handover.num_bytes >= job.num_bytes:
            stand_back()

    def write(writer: ObjectWriter, *beside: Callable[[], None]) -> str:
        return write_shard(
            writer,
            image,
            data_offset=job.data_offset,
            block_bytes=job.block_bytes,
            known=known,
            seal=seal,
            wait_filled=wait_filled,
            beside=beside,
            num_threads=job.num_threads or store.concurrency,
        )

    if handover.is_named_later and isinstance(store, LateNaming):
        unnamed = store.write_unnamed(job.num_bytes)
        if unnamed is not None:
            with suppress(NameRefusedError):
                return write(unnamed, lambda: unnamed.name(handover.wait_named().key))
    return write(store.write(handover.wait_named().key, job.num_bytes))


def store_address(
    root: str | os.PathLike[str] | Store, storage_options: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return ``url`` and ``storage_options`` with which another process opens ``root``, or ``None``.

    No other process can open a store object, the memory of this one, or what needs options that are not
    plain data, such as a session.
    """
    store = open_store(root, **storage_options)
    if isinstance(store, LocalStore):
        return {"url": store.url, "storage_options": {}}
    if not isinstance(root, str) or root.startswith("memory:"):
        return None
    options = dict(storage_options)
    try:
        is_plain = json.loads(json.dumps(options)) == options
    except TypeError:
        is_plain = False
    return {"url": root, "storage_options": options} if is_plain else None
