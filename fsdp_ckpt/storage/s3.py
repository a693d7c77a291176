"""Objects in an S3 bucket, through s3fs.

write:  image --slices--> parts, several in flight, none copied --> complete | abort
read:   ranged GETs --chunk by chunk--> the caller's buffer

Listings and sizes are asked for each time: another process's commit must be seen at once. Credentials and the
endpoint come from the storage options or, as botocore finds them, from the environment.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar
from zlib import crc32

from fsdp_ckpt.errors import (
    AlreadyCommittedError,
    CheckpointError,
    NotFoundError,
    StorageError,
    describe,
)
from fsdp_ckpt.storage.fsspec_store import without_credentials
from fsdp_ckpt.storage.retry import RetryPolicy, answer_of
from fsdp_ckpt.storage.s3_client import S3Client
from fsdp_ckpt.storage.s3_errors import to_our_tree
from fsdp_ckpt.storage.s3_listing import list_level, list_trees
from fsdp_ckpt.storage.s3_writer import MultipartWriter, PutWriter, choose_part_bytes
from fsdp_ckpt.storage.store import refuse_larger

__all__ = ["S3Store"]

T = TypeVar("T")

# Bytes of an answer that are copied at a time.
CHUNK_BYTES = 1024 * 1024


class S3Store:
    """Objects below a prefix of a bucket.

    Args:
        url: ``s3://BUCKET`` or ``s3://BUCKET/PREFIX``.
        storage_options: Of ``s3fs.S3FileSystem``, as plain data.
        policy: How failed requests are tried again; by default as ``config_kwargs["retries"]`` says.

    Raises:
        StorageError: An option is unusable, or the URL names no bucket, or credentials.
    """

    read_bytes = 32 * 1024 * 1024  # each request costs the server as much as some MiB
    # What a connection brings in the tens of milliseconds that a request takes to answer.
    gap_bytes = 4 * 1024 * 1024

    def __init__(
        self,
        url: str,
        storage_options: dict[str, Any] | None = None,
        *,
        policy: RetryPolicy | None = None,
    ) -> None:
        self.url = without_credentials(url).rstrip("/")
        try:
            self._client = S3Client(storage_options, policy)
        except (ImportError, KeyError, TypeError, ValueError) as e:
            raise StorageError(f"{self.url}: {describe(e)}", key=self.url) from e
        self._bucket, prefix = self._client.split(url)
        self._prefix = prefix.rstrip("/")
        if not self._bucket:
            raise StorageError(f"{self.url} names no bucket", key=self.url)
        if without_credentials(url) != url or "@" in self._bucket:
            raise StorageError(
                f"{self.url}: credentials belong in the storage options or the environment, not in the URL",
                key=self.url,
            )

    @property
    def concurrency(self) -> int:
        """Requests of one rank in flight."""
        return self._client.concurrency

    @property
    def sends_checksums(self) -> bool:
        """Whether bodies go with a checksum."""
        return self._client.sends_checksums

    def checksum(self, data: bytes | memoryview) -> dict[str, str]:
        """Return the argument that lets the server check a body."""
        if not self.sends_checksums:
            return {}
        # Here, on the caller's thread: botocore would do it on the one that all requests share, and over
        # HTTPS in a trailer, which other makers' servers may not know.
        return {"ChecksumCRC32": b64encode(crc32(data).to_bytes(4, "big")).decode()}

    def child(self, key: str) -> S3Store:
        """Return the store rooted at ``key``; it shares the connections."""
        store = object.__new__(type(self))
        store.url = f"{self.url}/{key}"
        store._client = self._client
        store._bucket, store._prefix = self._bucket, self._key(key)
        return store

    def _key(self, key: str) -> str:
        return "/".join(part for part in (self._prefix, key) if part)

    # --- requests ---

    def call(self, method: str, key: str, **arguments: Any) -> dict[str, Any]:
        """Make a request about an object, again where that may help."""
        return self.again(key, lambda earlier: self.once(method, key, **arguments))

    def once(self, method: str, key: str, **arguments: Any) -> dict[str, Any]:
        """Make a request about an object, once; for use inside :meth:`again`, which maps its errors."""
        return self._client.call(method, Bucket=self._bucket, Key=self._key(key), **arguments)

    def again(self, key: str, action: Callable[[int], T]) -> T:
        """Run ``action``, which gets the number of earlier tries, until it succeeds or that is of no use."""
        with self._mapped(key):
            return self._client.retry(action)

    @contextmanager
    def _mapped(self, key: str) -> Iterator[None]:
        """Map the server's answers, and the errors of s3fs and botocore, to our tree."""
        where = f"{self.url}/{key}" if key else self.url
        try:
            yield
        except CheckpointError:
            raise
        except Exception as e:
            raise to_our_tree(e, where, key, secrets=self._client.secrets) from e

    # --- writing ---

    def write(self, key: str, num_bytes: int) -> PutWriter | MultipartWriter:
        """Start a new object: an upload of several parts where it is larger than one."""
        part_bytes = choose_part_bytes(num_bytes, self._client.part_bytes, self.concurrency)
        self._refuse_existing(key)
        kind = PutWriter if num_bytes <= part_bytes else MultipartWriter
        return kind(self, key, num_bytes, part_bytes)

    def put(self, key: str, data: bytes) -> None:
        """Write a whole object, over whatever is there."""
        self.call("put_object", key, **self._body(data))

    def _body(self, data: bytes) -> dict[str, Any]:
        return {"Body": data, "body_bytes": len(data), **self.checksum(data)}

    def create(self, key: str, data: bytes) -> None:
        """Write a small object if the key is free.

        By a conditional put; since not every server knows those, after a look, and read back: of two rivals
        the one whose bytes are not there lost.
        """
        self._refuse_existing(key)
        if not self.again(key, lambda earlier: self._try_to_create(key, data, earlier)):
            raise self._exists(key)

    def _try_to_create(self, key: str, data: bytes, earlier: int) -> bool:
        """Put an object conditionally and read it back; return whether ours is there."""
        if not self._put_new(key, data, earlier):
            return False
        found = self._find(key)
        if earlier and found != data and found is not None and data.startswith(found):
            # rclone may keep a body that was cut after it has taken the whole one.
            raise StorageError(
                f"{self.url}/{key}: an earlier try overwrote it", key=key, retryable=True
            )
        return found == data

    def _put_new(self, key: str, data: bytes, earlier: int) -> bool:
        """Put an object conditionally; return false where someone else's is there."""
        body, condition = self._body(data), {"IfNoneMatch": "*"}
        # After a try whose answer was lost, what is there may be ours: the whole, or what rclone keeps of a
        # body that was cut.
        found = self._find(key) if earlier else None
        if found is not None:
            if found == data or not data.startswith(found):
                return found == data
            condition = {}
        try:
            self.once("put_object", key, **body, **condition)
        except Exception as e:
            answer = answer_of(e)
            if answer is not None and answer.status == 412:
                return False
            if answer is None or answer.status != 501:  # no conditional puts
                raise
            self.once("put_object", key, **body)
        return True

    def _find(self, key: str) -> bytes | None:
        with suppress(NotFoundError):
            return self.read(key)
        return None

    def _refuse_existing(self, key: str) -> None:
        with suppress(NotFoundError):
            self.size(key)
            raise self._exists(key)

    def _exists(self, key: str) -> AlreadyCommittedError:
        return AlreadyCommittedError(f"{self.url}/{key}: exists already", key=key)

    def open_uploads(self, key: str) -> list[str]:
        """Return the ids of the multipart uploads under exactly this key that have not ended."""
        name = self._key(key)
        # rclone answers that there is no such upload where there is none at all.
        with suppress(NotFoundError), self._mapped(key):
            found = self._client.call_again(
                "list_multipart_uploads", Bucket=self._bucket, Prefix=name
            )
            return [str(u["UploadId"]) for u in found.get("Uploads") or () if u["Key"] == name]
        return []

    def delete(self, key: str) -> None:
        """Remove one object."""
        with suppress(NotFoundError):
            self.call("delete_object", key)

    # --- reading ---

    def read(self, key: str, max_bytes: int | None = None) -> bytes:
        """Return the whole object."""
        return self.again(
            key, lambda earlier: self._client.run(lambda fs: self._get(fs, key, max_bytes))
        )

    async def _get(self, fs: Any, key: str, max_bytes: int | None) -> bytes:
        answer = await fs._call_s3("get_object", Bucket=self._bucket, Key=self._key(key))
        async with answer["Body"] as body:
            refuse_larger(answer["ContentLength"], max_bytes, self.url, key)
            data = bytes(await body.read())
        if len(data) != answer["ContentLength"]:
            raise self._cut(key, len(data), answer["ContentLength"], 0)
        return data

    def read_into(self, key: str, byte_offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` by a ranged GET; a further try goes on where the one before was cut."""
        if not buffer:
            return
        done = 0

        async def get(fs: Any) -> None:
            nonlocal done
            first, expected = byte_offset + done, len(buffer) - done
            answer = await fs._call_s3(
                "get_object",
                Bucket=self._bucket,
                Key=self._key(key),
                Range=f"bytes={first}-{first + expected - 1}",
            )
            async with answer["Body"] as body:
                if answer["ContentLength"] != expected:
                    raise StorageError(
                        f"{self.url}/{key}: {answer['ContentLength']} of {expected} bytes at byte {first}",
                        key=key,
                    )
                while done < len(buffer):
                    chunk = await body.read(min(CHUNK_BYTES, len(buffer) - done))
                    if not chunk:
                        raise self._cut(key, done, len(buffer), byte_offset)
                    buffer[done : done + len(chunk)] = chunk
                    done += len(chunk)

        self.again(key, lambda earlier: self._client.run(get, len(buffer)))

    def _cut(self, key: str, found: int, expected: int, byte_offset: int) -> StorageError:
        return StorageError(
            f"{self.url}/{key}: cut after {found} of {expected} bytes at byte {byte_offset}",
            retryable=True,
            key=key,
        )

    def size(self, key: str) -> int:
        """Return the object's size in bytes."""
        return int(self.call("head_object", key)["ContentLength"])

    # --- listing ---

    def list_folders(self) -> list[str]:
        """Return the names of the folders, sorted."""
        return self.list_level()[0]

    def list_files(self) -> dict[str, int]:
        """Return name → bytes of the objects."""
        return self.list_level()[1]

    def list_level(self) -> tuple[list[str], dict[str, int]]:
        """Return what ``list_folders`` and ``list_files`` do, by the requests of one of them."""
        prefix = f"{self._prefix}/" if self._prefix else ""
        folders, files = list_level(
            lambda position: self._list_page(prefix, Delimiter="/", **position), prefix
        )
        if self._prefix and not folders and not files:
            self._refuse_object()
        return sorted(folders), files

    def list_trees(self, folders: Collection[str]) -> dict[str, dict[str, int]]:
        """Return folder → key relative to it → bytes, of everything in some folders, at any depth."""
        prefix = f"{self._prefix}/" if self._prefix else ""
        if not folders:
            return {}
        return list_trees(lambda position: self._list_page(prefix, **position), prefix, folders)

    def _list_page(self, prefix: str, **arguments: str) -> dict[str, Any]:
        with self._mapped(""):
            return self._client.call_again(
                "list_objects_v2", Bucket=self._bucket, Prefix=prefix, **arguments
            )

    def _refuse_object(self) -> None:
        with suppress(NotFoundError), self._mapped(""):
            self._client.call_again("head_object", Bucket=self._bucket, Key=self._prefix)
            raise StorageError(f"{self.url}: an object, not a folder", key=self.url)
