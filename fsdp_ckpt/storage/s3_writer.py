"""New S3 objects: one put for a small one, a multipart upload for the rest.

Invariant: nothing is visible before ``commit``, and after ``abort`` neither an object nor an open upload is
left. Parts go out of the caller's own memory, and all but the last are of one size, which some stores demand.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from fsdp_ckpt.errors import CheckpointError, NotFoundError, StorageError
from fsdp_ckpt.storage.retry import answer_of
from fsdp_ckpt.storage.s3_client import MOST_REQUESTS

if TYPE_CHECKING:
    from fsdp_ckpt.storage.s3 import S3Store

__all__ = ["MultipartWriter", "PutWriter", "choose_part_bytes"]

logger = logging.getLogger("fsdp_ckpt")

MIB = 1024 * 1024
# S3's limits: https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
MOST_PARTS = 10_000
SMALLEST_PART, LARGEST_PART = 5 * MIB, 5 * 1024 * MIB
# Each part costs a server as much as some MiB: one for each connection, of up to 32 MiB; some dozens keep
# every connection busy to the end, and beyond 64 MiB they are no faster.
FEW_PARTS_UP_TO = 32 * MIB
USUAL_PARTS = 64
USUAL_SMALLEST, USUAL_LARGEST = 16 * MIB, 64 * MIB
# What the event loop hands to a socket at a time.
SEND_BYTES = MIB


def choose_part_bytes(
    num_bytes: int, wanted: int | None = None, concurrency: int = MOST_REQUESTS
) -> int:
    """Choose the size of an object's parts.

    Args:
        num_bytes: Of the object.
        wanted: By the user; taken within S3's limits.
        concurrency: Parts in flight.

    Raises:
        StorageError: The object is larger than S3 takes.
    """
    few = min(num_bytes // concurrency, FEW_PARTS_UP_TO)
    size = wanted or min(max(num_bytes // USUAL_PARTS, few, USUAL_SMALLEST), USUAL_LARGEST)
    size = -(-max(size, SMALLEST_PART, -(-num_bytes // MOST_PARTS)) // MIB) * MIB
    if size > LARGEST_PART:
        raise StorageError(
            f"an object of {num_bytes} bytes in parts of {size}: S3 takes {MOST_PARTS} parts of "
            f"{LARGEST_PART} bytes"
        )
    return size


class Slice:
    """A body that is read out of someone else's memory, as botocore and aiohttp read bodies."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._position = 0

    def __len__(self) -> int:
        return len(self._data)

    def read(self, size: int | None = None) -> bytes:
        """Return the next bytes: for a hash, where the user wants bodies signed."""
        stop = len(self._data) if size is None or size < 0 else self._position + size
        data = bytes(self._data[self._position : stop])
        self._position += len(data)
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move as files do."""
        self._position = offset + (0, self._position, len(self._data))[whence]
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position

    async def __aiter__(self) -> AsyncIterator[memoryview]:
        for at in range(0, len(self._data), SEND_BYTES):
            yield self._data[at : at + SEND_BYTES]


class PutWriter:
    """An object of one part, sent at the end."""

    ordered = False

    def __init__(self, store: S3Store, key: str, num_bytes: int, part_bytes: int) -> None:
        self._store = store
        self._key = key
        self._num_bytes = num_bytes
        self.part_bytes = part_bytes
        self._data: bytes | None = None if num_bytes else b""
        self._sent = False

    def write_at(self, byte_offset: int, data: memoryview) -> None:
        """Keep the only part."""
        check_part(self._key, byte_offset, len(data), self._num_bytes, self.part_bytes)
        self._data = bytes(data)

    def flush(self) -> None:
        """Do nothing: the object appears whole, at the end."""

    def commit(self) -> None:
        """Put the object."""
        if self._data is None:
            raise StorageError(f"{self._key}: 0 of {self._num_bytes} bytes written", key=self._key)
        self._sent = True
        self._store.put(self._key, self._data)

    def abort(self) -> None:
        """Drop the object."""
        self._data = None
        if self._sent:
            self._store.delete(self._key)


class MultipartWriter:
    """An object of many parts."""

    ordered = False

    def __init__(self, store: S3Store, key: str, num_bytes: int, part_bytes: int) -> None:
        self._store = store
        self._key = key
        self._num_bytes = num_bytes
        self.part_bytes = part_bytes
        self._parts: dict[int, dict[str, Any]] = {}
        self._completing = False
        self._upload = self._create()

    def _create(self) -> str:
        """Start the upload; one whose answer was lost is found and aborted."""
        tries = 0

        def create(earlier: int) -> str:
            nonlocal tries
            tries = earlier + 1
            more = {"ChecksumAlgorithm": "CRC32"} if self._store.sends_checksums else {}
            return str(self._store.once("create_multipart_upload", self._key, **more)["UploadId"])

        upload = ""
        try:
            upload = self._store.again(self._key, create)
        finally:
            if tries > 1 or not upload:
                self._abort_others(upload)
        return upload

    def _abort_others(self, upload: str) -> None:
        try:
            for other in self._store.open_uploads(self._key):
                if other != upload:
                    self._abort(other)
        except CheckpointError as e:
            # The bucket's lifecycle rule has to collect it.
            logger.warning("%s: an upload may have stayed open: %s", self._key, e)

    def write_at(self, byte_offset: int, data: memoryview) -> None:
        """Send one part, out of ``data`` itself."""
        check_part(self._key, byte_offset, len(data), self._num_bytes, self.part_bytes)
        number = byte_offset // self.part_bytes + 1
        checksum = self._store.checksum(data)

        def send(earlier: int) -> dict[str, Any]:
            return self._store.once(
                "upload_part",
                self._key,
                UploadId=self._upload,
                PartNumber=number,
                Body=Slice(data),
                body_bytes=len(data),
                **checksum,
            )

        try:
            answer = self._store.again(self._key, send)
        except NotFoundError as e:
            raise StorageError(
                f"{self._key}: someone else has ended the upload", key=self._key
            ) from e
        self._parts[number] = {"PartNumber": number, "ETag": answer["ETag"], **checksum}

    def flush(self) -> None:
        """Do nothing: the object appears whole, at the end."""

    def commit(self) -> None:
        """Complete the upload."""
        num_parts = -(-self._num_bytes // self.part_bytes)
        if len(self._parts) != num_parts:
            raise StorageError(
                f"{self._key}: {len(self._parts)} of {num_parts} parts written", key=self._key
            )
        parts = [self._parts[number] for number in sorted(self._parts)]
        self._completing = True

        def complete(earlier: int) -> None:
            try:
                self._store.once(
                    "complete_multipart_upload",
                    self._key,
                    UploadId=self._upload,
                    MultipartUpload={"Parts": parts},
                )
            except Exception as e:
                answer = answer_of(e)
                is_done = earlier and answer is not None and answer.status == 404
                # An earlier try's answer was lost, and the upload is gone because it is an object now.
                if not (is_done and self._is_there()):
                    raise

        try:
            self._store.again(self._key, complete)
        except NotFoundError as e:
            raise StorageError(
                f"{self._key}: someone else has ended the upload", key=self._key
            ) from e

    def _is_there(self) -> bool:
        with suppress(NotFoundError):
            return self._store.size(self._key) == self._num_bytes
        return False

    def abort(self) -> None:
        """Drop the parts, and the object where the upload may have been completed."""
        try:
            self._abort(self._upload)
        finally:
            if self._completing:
                self._store.delete(self._key)

    def _abort(self, upload: str) -> None:
        def drop(earlier: int) -> None:
            try:
                self._store.once("abort_multipart_upload", self._key, UploadId=upload)
            except Exception as e:
                answer = answer_of(e)
                if answer is None or answer.status != 404:  # gone already
                    raise

        self._store.again(self._key, drop)


def check_part(key: str, byte_offset: int, length: int, num_bytes: int, part_bytes: int) -> None:
    """Refuse what is not one whole part.

    Raises:
        StorageError: It is not.
    """
    expected = min(part_bytes, num_bytes - byte_offset)
    if byte_offset % part_bytes or length != expected or not length:
        raise StorageError(
            f"{key}: {length} bytes at byte {byte_offset} are no part of {part_bytes} bytes",
            key=key,
        )
