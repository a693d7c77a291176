"""A file of ``torch.save`` on storage: a zip archive whose pickle is read and whose tensors are located.

    end of the archive --> directory --> data.pkl --> content, with the place of each storage

Invariant: a tensor's place lies inside the file, in a member that is stored as it is.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_ckpt.deepspeed.unpickler import read_pickle
from fsdp_ckpt.errors import CorruptCheckpointError
from fsdp_ckpt.manifest.strict_json import brief
from fsdp_ckpt.storage.store import Store

__all__ = ["TorchFile", "open_torch_file"]

# Of a hundred thousand tensors; those of ZeRO hold a few per group.
MAX_PICKLE_BYTES = 256 * 1024 * 1024
DIRECTORY_BYTES = 64 * 1024  # read at a time
# Of a member: signature, 22 bytes that the directory has too, lengths of name and extra field.
_LOCAL_HEADER = struct.Struct("<4s22xHH")


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFile:
    """A file that was opened.

    Args:
        key: In its store.
        content: What was saved; tensors are :class:`~fsdp_ckpt.deepspeed.unpickler.StoredTensor`.
    """

    key: str
    content: Mapping[str, Any]


def open_torch_file(store: Store, key: str, num_bytes: int) -> TorchFile:
    """Read what a file holds, without its tensors.

    Args:
        store: Its folder.
        key: Its name.
        num_bytes: Its size.

    Raises:
        CorruptCheckpointError: Truncated, or not a file of ``torch.save``.
        UnencodableStateError: It holds objects that could run code.
        StorageError: The store failed.
    """
    archive = _Archive(store, key, num_bytes)
    content = read_pickle(archive.read_pickle(), archive.where, archive.locate)
    if not isinstance(content, dict):
        raise archive.damaged(f"holds a {type(content).__name__} instead of a dict")
    return TorchFile(key=key, content=content)


class _Archive:
    def __init__(self, store: Store, key: str, num_bytes: int) -> None:
        self.where = f"{store.url}/{key}"
        self._store = store
        self._key = key
        self._num_bytes = num_bytes
        self._found: dict[str, int] = {}
        try:
            with zipfile.ZipFile(
                io.BufferedReader(_StoredBytes(store, key, num_bytes), DIRECTORY_BYTES)
            ) as archive:
                self._members = {info.filename: info for info in archive.infolist()}
        except (zipfile.BadZipFile, ValueError, struct.error, NotImplementedError) as e:
            raise self.damaged(f"not a whole file of torch.save ({brief(e)})") from e
        pickles = [name for name in self._members if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise self.damaged(f"{len(pickles)} members data.pkl, 1 expected")
        self._folder = pickles[0].removesuffix("data.pkl")
        if f"{self._folder}byteorder" in self._members and self._read("byteorder", 16) != b"little":
            raise self.damaged("written on a big-endian machine, which is not read")

    def damaged(self, what: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{self.where}: {what}; copy the file anew, or take another tag", key=self._key
        )

    def read_pickle(self) -> bytes:
        return self._read("data.pkl", MAX_PICKLE_BYTES)

    def locate(self, storage: str, num_bytes: int) -> int:
        """Return where a storage of ``num_bytes`` starts in the file."""
        return self._start(f"data/{storage}", num_bytes)

    def _read(self, name: str, max_bytes: int) -> bytes:
        size = self._members[self._folder + name].file_size
        if size > max_bytes:
            raise self.damaged(f"{name} of {size} bytes, at most {max_bytes} expected")
        data = bytearray(size)
        start = self._start(name, size)
        self._store.read_into(self._key, start, memoryview(data))
        return bytes(data)

    def _start(self, name: str, num_bytes: int) -> int:
        """Return where a member's bytes start, which its own header says: names and padding are before."""
        info = self._members.get(self._folder + name)
        if info is None or info.file_size < num_bytes:
            found = "is missing" if info is None else f"has {info.file_size}"
            raise self.damaged(f"{name} {found}, {num_bytes} bytes expected")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise self.damaged(f"{name} is compressed or encrypted, which torch never does")
        if name not in self._found:
            header = bytearray(_LOCAL_HEADER.size)
            if info.header_offset + len(header) > self._num_bytes:
                raise self.damaged(f"{name} starts behind the end")
            self._store.read_into(self._key, info.header_offset, memoryview(header))
            signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
            start = info.header_offset + len(header) + name_bytes + extra_bytes
            if signature != b"PK\x03\x04" or start + info.file_size > self._num_bytes:
                raise self.damaged(f"{name} is not where the directory says")
            self._found[name] = start
        return self._found[name]


class _StoredBytes(io.RawIOBase):
    """An object of a store as :mod:`zipfile` reads it."""

    def __init__(self, store: Store, key: str, num_bytes: int) -> None:
        self._store = store
        self._key = key
        self._num_bytes = num_bytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._num_bytes}[whence]
        if base + offset < 0:
            raise OSError("a position before the start")  # zipfile's way to learn of a short file
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        num_bytes = max(min(len(view), self._num_bytes - self._position), 0)
        if num_bytes:
            self._store.read_into(self._key, self._position, view[:num_bytes])
        self._position += num_bytes
        return num_bytes
