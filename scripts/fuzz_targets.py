"""What the fuzzer feeds: readers of hostile input, each with what must hold whatever it reads.

manifest     bytes of a manifest.json
header       bytes of a shard file's header region
value        typed JSON
checkpoint   JSON of a manifest, headers and data, put together with digests that match, so that all that
             reads a checkpoint gets to see what was changed
"""

from __future__ import annotations

import base64
import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from fsdp_ckpt.commit.catalog import find_checkpoints
from fsdp_ckpt.commit.checkpoint import Checkpoint
from fsdp_ckpt.commit.publish import MANIFEST_KEY
from fsdp_ckpt.commit.verify import find_damage
from fsdp_ckpt.errors import CheckpointError, NotFoundError, StorageError
from fsdp_ckpt.manifest.schema import Manifest
from fsdp_ckpt.manifest.shard import ShardHeader
from fsdp_ckpt.manifest.typed_json import Codec
from fsdp_ckpt.plan.box import Box
from fsdp_ckpt.storage.store import refuse_larger

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden" / "v1" / "step-000000042"
FOLDER = "step-000000042"
LIMIT_S = 5.0  # of processor time, a hundred times what the slowest sound input takes
MAX_LINE = 2000

# Literals that json.dumps does not write: they are put into the text in the place of a string.
DEPTH = 5000
LITERALS = {
    "~nan~": "NaN",
    "~infinity~": "-Infinity",
    "~e999~": "1e999",
    "~digits~": "9" * 5000,
    "~lists~": "[" * DEPTH + "]" * DEPTH,
    "~objects~": '{"a":' * DEPTH + "1" + "}" * DEPTH,
    "~deepest~": "[" * 900 + "]" * 900,
    "~open~": "[" * DEPTH,
}
TWICE = "~twice~"


class HangError(BaseException):
    """A reader did not come back; not an Exception, so that none of them takes it for its own."""


class MemoryStore:
    """A checkpoint's files in memory, in place of a folder; refuses keys that lead out of it, as a bug.

    Args:
        files: Key → content, for all stores below one root.
        prefix: Root of this one.
    """

    concurrency = 1
    read_bytes = 16 * 1024 * 1024
    gap_bytes = 0

    def __init__(self, files: dict[str, bytes], prefix: str = "") -> None:
        self.files, self.prefix = files, prefix
        self.url = f"memory://{prefix.rstrip('/')}"

    def _key(self, key: str) -> str:
        parts = key.split("/")
        if not {"", ".", ".."}.isdisjoint(parts) or "\0" in key or ":" in key:
            raise AssertionError(f"the key {key!r} leads out of the checkpoint")
        return f"{self.prefix}{key}"

    def child(self, key: str) -> MemoryStore:
        """Return the store rooted at ``key``."""
        return MemoryStore(self.files, f"{self._key(key)}/")

    def read(self, key: str, max_bytes: int | None = None) -> bytes:
        """Return the whole object."""
        try:
            data = self.files[self._key(key)]
        except KeyError as e:
            raise NotFoundError(f"{key}: not found", key=key) from e
        refuse_larger(len(data), max_bytes, self.url, key)
        return data

    def read_into(self, key: str, byte_offset: int, buffer: memoryview) -> None:
        """Fill ``buffer``."""
        data = self.read(key)[byte_offset : byte_offset + len(buffer)]
        if len(data) != len(buffer):
            raise StorageError(f"{key}: {len(data)} of {len(buffer)} bytes", key=key)
        buffer[:] = data

    def size(self, key: str) -> int:
        """Return the object's size in bytes."""
        return len(self.read(key))

    def list_folders(self) -> list[str]:
        """Return the names of the folders."""
        return sorted({name.split("/")[0] for name in self._below() if "/" in name})

    def list_files(self) -> dict[str, int]:
        """Return name → bytes."""
        return {n: len(self.files[self.prefix + n]) for n in self._below() if "/" not in n}

    def _below(self) -> list[str]:
        start = len(self.prefix)
        return [name[start:] for name in self.files if name.startswith(self.prefix)]


def seal_manifest(text: bytes) -> bytes:
    """Return a manifest's text with a digest that matches."""
    body = text.rpartition(b',"digest":"')[0] or text.removesuffix(b"}")
    return body + b',"digest":"' + xxhash.xxh3_64_hexdigest(body).encode() + b'"}'


def seal_header(text: bytes) -> bytes:
    """Return a header region with a length that matches."""
    text += b" " * (-(8 + len(text)) % 4096)
    return len(text).to_bytes(8, "little") + text


def write_json(document: Any) -> bytes:
    """Write a document, with what JSON's own writer does not write."""
    text = json.dumps(document, separators=(",", ":")).replace(f'"{TWICE}', '"')
    for name, literal in LITERALS.items():
        text = text.replace(f'"{name}"', literal)
    return text.encode()


def golden_parts() -> dict[str, Any]:
    """Return the golden checkpoint as the parts that :func:`check_checkpoint` puts together."""
    manifest = json.loads((GOLDEN / MANIFEST_KEY).read_bytes())
    headers, data = {}, {}
    for name, _, data_offset, _ in manifest["files"]:
        content = (GOLDEN / name).read_bytes()
        headers[name] = read_header(content[:data_offset])
        data[name] = base64.b85encode(content[data_offset:]).decode()
    return {"manifest": manifest, "headers": headers, "data": data}


def read_header(region: bytes) -> dict[str, Any]:
    """Return a header with our part of it in place, not in a string."""
    header: dict[str, Any] = json.loads(region[8:])
    header["__metadata__"]["fsdp_ckpt"] = json.loads(header["__metadata__"]["fsdp_ckpt"])
    return header


def write_header(header: Any) -> bytes:
    """Undo :func:`read_header`, also for what is no header."""
    try:
        about = header["__metadata__"]["fsdp_ckpt"]
        metadata = {**header["__metadata__"], "fsdp_ckpt": write_json(about).decode()}
        header = {**header, "__metadata__": metadata}
    except (KeyError, TypeError):
        pass
    return seal_header(write_json(header))


def check_manifest(content: bytes) -> None:
    """Read a manifest; what is accepted is written as it was read, and its chunks are where it says."""
    manifest = Manifest.from_bytes(content, "manifest.json")
    if Manifest.from_bytes(manifest.to_bytes(), "again") != manifest:
        raise AssertionError("another manifest when it is written and read again")
    for row in manifest.tensors:
        if len(row.layout.ranks) <= 1000:
            chunks = row.chunks
            held = sum(math.prod(sizes) for sizes in chunks.sizes.tolist())
            if held != math.prod(row.shape) or max(chunks.ranks, default=0) >= manifest.world_size:
                raise AssertionError(f"chunks of {held} elements for a shape of {row.shape}")


def check_header(content: bytes) -> None:
    """Read a header region; what is accepted is written as it was read."""
    header = ShardHeader.from_bytes(content, "shard")
    if ShardHeader.from_bytes(header.to_bytes(), "again") != header:
        raise AssertionError("another header when it is written and read again")


def check_value(content: bytes) -> None:
    """Decode typed JSON, and encode what it is."""
    try:
        encoded = json.loads(content)
    except (ValueError, RecursionError):
        return  # the manifest's reader has seen to it
    Codec().encode(Codec().decode(encoded), "value")


def put_together(parts: Any) -> dict[str, bytes]:
    """Return the files of a checkpoint, key → content, with sizes and digests that match where they can.

    Raises:
        ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError: No such parts.
    """
    files = {}
    for key, data in parts["data"].items():
        files[key] = write_header(parts["headers"][key]) + base64.b85decode(data)
        data_offset = 8 + int.from_bytes(files[key][:8], "little")
        digest = xxhash.xxh3_64_hexdigest(files[key][:data_offset])
        for row in parts["manifest"]["files"]:
            if row[0] == key and type(row[1]) is type(row[2]) is int:
                row[1:] = [row[1] + data_offset - row[2], data_offset, digest]
    files[MANIFEST_KEY] = seal_manifest(write_json(parts["manifest"]))
    return files


def check_checkpoint(content: bytes) -> None:
    """Read a checkpoint that is put together from changed parts, in each way there is."""
    try:
        files = put_together(json.loads(content))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return  # no checkpoint at all
    root = MemoryStore({f"{FOLDER}/{key}": data for key, data in files.items()})
    list(find_checkpoints(root))
    read_checkpoint(Checkpoint.open(root.child(FOLDER)))


def read_checkpoint(checkpoint: Checkpoint) -> None:
    """Verify and read all of an open checkpoint; each part, whatever comes of the others."""
    failures: list[CheckpointError] = list(find_damage(checkpoint, 1))

    def attempt(action: Callable[[], Any]) -> None:
        try:
            action()
        except CheckpointError as e:
            failures.append(e)

    def read_whole(name: str) -> None:
        row = checkpoint.rows[name]
        for pieces in (checkpoint.pieces, checkpoint.file_pieces):
            found = pieces(row, Box.whole(row.shape))
            images = checkpoint.read(found, 1)
            if sum(images.array(piece).nbytes for piece in found) != row.num_bytes:
                raise AssertionError(f"{name}: pieces of other bytes than the tensor's")

    def read_own(rank: int) -> None:
        for name in checkpoint.header(rank).own:
            piece = checkpoint.own_piece(rank, name)
            if piece is not None:
                checkpoint.read([piece], 1).array(piece)

    attempt(checkpoint.check_files)
    for name in checkpoint.rows:
        attempt(lambda name=name: read_whole(name))  # type: ignore[misc]
    for rank in range(checkpoint.manifest.world_size):
        attempt(lambda rank=rank: read_own(rank))  # type: ignore[misc]
    for failure in failures:
        check_line(failure)


def check_line(error: CheckpointError) -> None:
    """Prove that an error is one line that fits on a screen."""
    if len(str(error)) > MAX_LINE or "\n" in str(error):
        raise AssertionError(f"a message of {len(str(error))} characters: {str(error)[:200]}")


CHECKS: dict[str, Callable[[bytes], None]] = {
    "manifest": check_manifest,
    "header": check_header,
    "value": check_value,
    "checkpoint": check_checkpoint,
}


def run(target: str, content: bytes) -> None:
    """Feed one input; raises anything but an error of our tree, and what took too long."""
    start = time.process_time()
    with _hard_limit(4 * LIMIT_S):
        try:
            CHECKS[target](content)
        except CheckpointError as e:
            check_line(e)
    if time.process_time() - start > LIMIT_S:
        raise AssertionError(f"{time.process_time() - start:.1f} s for {len(content)} bytes")


@contextmanager
def _hard_limit(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise HangError(f"no answer after {seconds} s")

    # By processor time too: a machine that stalls is no reader that hangs.
    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
