"""Local files: the same bytes, whichever way they go."""

from __future__ import annotations

import errno
import mmap
import os
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fsdp_ckpt.errors import (
    StorageError,
)
from fsdp_ckpt.storage.local import LocalStore
from fsdp_ckpt.storage.local_writer import DIRECT_BYTES
from tests.local_files import (
    BLOCK,
    PAGE,
    WAYS,
    image_of,
    is_direct,
    mounted,
    needs_direct,
    put,
    round_trip,
)

SIZES = (
    0,
    1,
    PAGE - 1,
    PAGE,
    PAGE + 1,
    DIRECT_BYTES,
    3 * BLOCK,
    3 * BLOCK + 1,
    3 * BLOCK - PAGE + 7,
)


def read_back(store: LocalStore, key: str, start: int, stop: int) -> bytes:
    """Read a range into memory that is aligned as the file is."""
    inside = start % PAGE
    buffer = memoryview(mmap.mmap(-1, inside + stop - start + 1))[inside:]
    store.read_into(key, start, buffer[: stop - start])
    assert buffer[stop - start] == 0
    return bytes(buffer[: stop - start])


def drop_cache(path: Path) -> None:
    """Let the page cache forget a file."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


class Calls:
    """What ``os.pwrite`` and ``os.preadv`` moved, by (name, whether direct)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.moved: dict[tuple[str, bool], int] = {}
        self._lock = threading.Lock()
        for name in ("pwrite", "preadv"):
            monkeypatch.setattr(os, name, self._count(name, getattr(os, name)))

    def _count(self, name: str, function: Callable[..., int]) -> Callable[..., int]:
        def call(fd: int, *args: Any) -> int:
            count = function(fd, *args)
            if len(args) < 3:  # a probe of the cache moves nothing
                with self._lock:
                    key = name, is_direct(fd)
                    self.moved[key] = self.moved.get(key, 0) + count
            return count

        return call


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return needs_direct(tmp_path)


@pytest.mark.parametrize("direct", WAYS)
@pytest.mark.parametrize("size", SIZES)
def test_any_size_reads_back(tmp_path: Path, size: int, direct: bool | None) -> None:
    """What is written either way is in the file, and reads back either way, cached or not."""
    data = image_of(size)
    put(LocalStore(str(tmp_path), direct=direct), "a/k", data)
    path = tmp_path / "a" / "k"
    assert path.read_bytes() == data
    for reading in WAYS:
        store = LocalStore(str(tmp_path), direct=reading)
        for _ in range(2):
            assert read_back(store, "a/k", 0, size) == data
            assert read_back(store, "a/k", size // 3, size) == data[size // 3 :]
            drop_cache(path)


@pytest.mark.parametrize("offset", [0, 1, 64])
def test_any_memory_will_do(tmp_path: Path, offset: int) -> None:
    """Memory that starts nowhere in particular, and memory that cannot be written, read back too."""
    data = image_of(BLOCK + 5)
    store = LocalStore(str(tmp_path), direct=True)
    put(store, "k", memoryview(bytes(offset) + data)[offset:])
    buffer = memoryview(bytearray(offset + len(data)))[offset:]
    drop_cache(tmp_path / "k")
    store.read_into("k", 0, buffer)
    assert store.read("k") == buffer == data


def test_threads_that_share_pages_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Pieces cut anywhere, written by many threads in any order, are all in the file."""
    chance = random.Random(1)
    for seed in range(6):
        size = 2 * BLOCK + chance.randrange(2 * PAGE)
        data = image_of(size, seed)
        near = [chance.randrange(1, 2 * BLOCK // PAGE) * PAGE for _ in range(12)]
        cuts = sorted({at + chance.choice((-1, 0, 1, 100)) for at in near})
        spans = list(zip([0, *cuts], [*cuts, size], strict=True))
        chance.shuffle(spans)
        writer = LocalStore(str(tmp_path), direct=True).write(f"k{seed}", size)
        with ThreadPoolExecutor(6) as threads:
            list(threads.map(lambda span: writer.write_at(span[0], data[slice(*span)]), spans))  # noqa: B023  # ends here
        writer.commit()
        assert (tmp_path / f"k{seed}").read_bytes() == data
        drop_cache(tmp_path / f"k{seed}")
        assert (tmp_path / f"k{seed}").read_bytes() == data


def test_large_files_bypass_the_page_cache(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the last part of a page goes directly, both ways; small files and small reads do not."""
    data = image_of(BLOCK + 5)
    calls = Calls(monkeypatch)
    store = LocalStore(str(disk))
    put(store, "k", data)
    assert calls.moved == {("pwrite", True): BLOCK, ("pwrite", False): 5}
    drop_cache(disk / "k")
    calls.moved.clear()
    assert read_back(store, "k", 0, len(data)) == data
    assert calls.moved == {("preadv", True): BLOCK, ("preadv", False): 5}
    calls.moved.clear()
    put(store, "small", data[:PAGE])
    assert read_back(store, "small", 0, PAGE) == data[:PAGE]
    assert calls.moved == {("pwrite", False): PAGE, ("preadv", False): PAGE}


def test_what_is_cached_is_read_from_the_cache(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default; a store that is told to go directly does."""
    (disk / "k").write_bytes(image_of(BLOCK))
    drop_cache(disk / "k")
    (disk / "k").read_bytes()
    calls = Calls(monkeypatch)
    for direct, is_cached in ((None, False), (True, True), (False, False)):
        calls.moved.clear()
        LocalStore(str(disk), direct=direct).read_into("k", 0, image_of(BLOCK, 1))
        assert calls.moved == {("preadv", is_cached): BLOCK}


def test_folders_inherit_the_choice(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store below one that is told never to go directly does not either."""
    calls = Calls(monkeypatch)
    put(LocalStore(str(disk), direct=False).child("a").child("b"), "k", image_of(BLOCK))
    put(LocalStore(str(disk), direct=True).child("a").child("b"), "small", image_of(PAGE))
    assert calls.moved == {("pwrite", False): BLOCK, ("pwrite", True): PAGE}


def test_reading_takes_no_random_number_of_the_program(tmp_path: Path) -> None:
    """The program's generator is where it was."""
    store = LocalStore(str(tmp_path))
    put(store, "k", image_of(BLOCK))
    before = random.getstate()
    read_back(store, "k", 0, BLOCK)
    assert random.getstate() == before


# --- file systems that refuse ---


@pytest.mark.parametrize("kind", ["ramfs", "tmpfs"])
def test_file_systems_in_memory(tmp_path: Path, kind: str) -> None:
    """Some refuse direct I/O, some ignore it; shards are written and read whatever the store was told."""
    with mounted(kind, tmp_path):
        for direct in WAYS:
            round_trip(LocalStore(str(tmp_path), direct=direct))


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("verb", ["open", "pwrite", "preadv"])
def test_a_refusal_of_direct_io_is_no_error(
    disk: Path, monkeypatch: pytest.MonkeyPatch, verb: str, number: int
) -> None:
    """Whether it comes when the file is opened or later, the bytes go through the page cache."""
    function, refused = getattr(os, verb), []

    def refuse(target: Any, *args: Any) -> Any:
        if args[0] & os.O_DIRECT if verb == "open" else is_direct(target):
            refused.append(target)
            raise OSError(number, os.strerror(number))
        return function(target, *args)

    monkeypatch.setattr(os, verb, refuse)
    round_trip(LocalStore(str(disk), direct=True))
    assert refused


@pytest.mark.parametrize("limit", [1000, PAGE, 3 * PAGE])
def test_short_writes_and_reads_go_on(
    disk: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """A system call may move less than it was asked to, and leave off inside a page."""
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:limit], at))
    monkeypatch.setattr(
        os, "preadv", lambda fd, parts, at, *flags: preadv(fd, [parts[0][:limit]], at, *flags)
    )
    data = image_of(DIRECT_BYTES + 5)
    store = LocalStore(str(disk), direct=True)
    put(store, "k", data, cuts=(PAGE, 9 * PAGE + 1))
    assert read_back(store, "k", 0, len(data)) == data


@pytest.mark.parametrize("direct", WAYS)
def test_a_file_that_ends_too_early_is_an_error(tmp_path: Path, direct: bool | None) -> None:
    """The message says where it ends, whichever way it was read."""
    store = LocalStore(str(tmp_path), direct=direct)
    for size in (0, 10, BLOCK - PAGE, BLOCK + 10):
        (tmp_path / "k").write_bytes(bytes(size))
        drop_cache(tmp_path / "k")
        with pytest.raises(StorageError, match=f"ends at byte {size}, {2 * BLOCK - size} more"):
            store.read_into("k", 0, image_of(2 * BLOCK))
