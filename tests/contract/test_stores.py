"""One contract, which every store keeps: what each verb does, and what others see of it."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import pathlib
import resource
import subprocess
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile

from fsdp_ckpt.errors import (
    AlreadyCommittedError,
    CheckpointError,
    CorruptCheckpointError,
    NotFoundError,
    StorageError,
)
from fsdp_ckpt.storage import ObjectWriter, Store, open_store
from fsdp_ckpt.storage.fsspec_store import FsspecStore
from fsdp_ckpt.storage.local import LocalStore
from fsdp_ckpt.storage.shard_io import digest, write_shard
from tests.shards import read_ranges

OpenStore = Callable[[], Store]


class ObjectFile(AbstractBufferedFile):
    """A file that becomes an object when it is closed, as on object stores."""

    def _initiate_upload(self) -> None:
        self.sent = b""

    def _upload_chunk(self, final: bool = False) -> bool:
        self.sent += self.buffer.getvalue()
        if final:
            self.fs.pipe_file(self.path, self.sent)
        return True


class ObjectFileSystem(MemoryFileSystem):
    """Memory that behaves like an object store: late publication, and cached listings."""

    protocol = "objects"
    store: dict[str, Any] = {}  # noqa: RUF012  # one for all instances, as in the base class
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("objects://", "memory://", 1))

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if mode == "wb" and "data" not in kwargs:
            return ObjectFile(self, path, mode, block_size=1000)
        return super()._open(path, mode, **kwargs)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        path = self._strip_protocol(path)
        if path not in self.dircache:
            self.dircache[path] = super().ls(path, detail=True)
        return self.dircache[path] if detail else [info["name"] for info in self.dircache[path]]

    def info(self, path: str, **kwargs: Any) -> Any:
        path = self._strip_protocol(path)
        cached = [info for info in self._ls_from_cache(path) or () if info["name"] == path]
        return cached[0] if cached else super().info(path, **kwargs)

    def invalidate_cache(self, path: str | None = None) -> None:
        if path is None:
            self.dircache.clear()
        else:
            self.dircache.pop(self._strip_protocol(path), None)


class BrokenFileSystem(ObjectFileSystem):
    """A filesystem whose server answers nothing but errors of its own client library."""

    protocol = "broken"

    def info(self, path: str, **kwargs: Any) -> Any:
        raise RuntimeError("no\nanswer")

    ls = cat_file = rm_file = info


fsspec.register_implementation("objects", ObjectFileSystem, clobber=True)
fsspec.register_implementation("broken", BrokenFileSystem, clobber=True)


@pytest.fixture(params=["local", "fsspec-local", "memory", "objects"])
def open_it(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> OpenStore:
    """Open a store on the same new root, a new instance each time."""
    root = uuid.uuid4().hex
    openers: dict[str, OpenStore] = {
        "local": lambda: LocalStore(str(tmp_path / root)),
        "fsspec-local": lambda: FsspecStore(f"file://{tmp_path}/{root}"),
        # skip_instance_cache: another process has another filesystem object.
        "memory": lambda: FsspecStore(f"memory://{root}", {"skip_instance_cache": True}),
        "objects": lambda: FsspecStore(f"objects://{root}", {"skip_instance_cache": True}),
    }
    return openers[request.param]


@pytest.fixture
def store(open_it: OpenStore) -> Store:
    return open_it()


def put(store: Store, key: str, data: bytes) -> None:
    """Write an object as shards are written."""
    writer = store.write(key, len(data))
    half = len(data) // 2
    writer.write_at(0, memoryview(data)[:half])
    writer.write_at(half, memoryview(data)[half:])
    writer.commit()


def read_part(store: Store, key: str, start: int, length: int) -> bytes:
    buffer = bytearray(length + 2)
    store.read_into(key, start, memoryview(buffer)[1:-1])
    assert buffer[0] == buffer[-1] == 0
    return bytes(buffer[1:-1])


DATA = bytes(range(256)) * 33


# --- reading and writing ---


@pytest.mark.parametrize("data", [b"", b"x", DATA], ids=len)
def test_objects_read_back(store: Store, data: bytes) -> None:
    """What is written by either verb is there, to the byte, with its size."""
    put(store, "a/shard", data)
    store.create("a/note", data)
    for key in ("a/shard", "a/note"):
        assert store.read(key) == data
        assert store.size(key) == len(data)


def test_ranges_read_back(store: Store) -> None:
    """Any range of an object fills exactly the buffer that is given."""
    put(store, "k", DATA)
    for start, length in ((0, 1), (0, len(DATA)), (7, 4096), (len(DATA) - 1, 1), (5000, 3)):
        assert read_part(store, "k", start, length) == DATA[start : start + length]
    store.read_into("k", 3, memoryview(bytearray()))


@pytest.mark.parametrize(
    ("start", "length"), [(0, len(DATA) + 1), (len(DATA), 1), (len(DATA) + 9, 5), (2**40, 1)]
)
def test_ranges_beyond_the_end_are_errors(store: Store, start: int, length: int) -> None:
    """A short object is an error of the store, never a short read."""
    put(store, "k", DATA)
    with pytest.raises(StorageError):
        read_part(store, "k", start, length)


def test_writers_take_bytes_in_the_order_they_ask_for(store: Store) -> None:
    """An unordered writer takes any order from any thread; an ordered one refuses what is out of order."""
    writer = store.write("k", len(DATA))
    spans = [(at, DATA[at : at + 1000]) for at in range(0, len(DATA), 1000)]
    if writer.ordered:
        with pytest.raises(StorageError, match="order"):
            writer.write_at(1000, memoryview(DATA)[1000:2000])
        writer.abort()
        return
    with ThreadPoolExecutor(4) as threads:
        list(
            threads.map(lambda span: writer.write_at(span[0], memoryview(span[1])), reversed(spans))
        )
    writer.commit()
    assert store.read("k") == DATA


def test_the_caller_may_use_the_buffer_again(store: Store) -> None:
    """A writer has taken the bytes when it returns."""
    writer = store.write("k", 2000)
    buffer = bytearray(b"a" * 1000)
    writer.write_at(0, memoryview(buffer))
    buffer[:] = b"b" * 1000
    writer.write_at(1000, memoryview(buffer))
    buffer[:] = b"c" * 1000
    writer.commit()
    assert store.read("k") == b"a" * 1000 + b"b" * 1000


@pytest.mark.parametrize("num_bytes", [0, 10, 2500])
def test_aborted_objects_leave_nothing(open_it: OpenStore, num_bytes: int) -> None:
    """After an abort the key is free, and nothing appears under it later."""
    store = open_it()
    writer = store.write("a/k", 5000)
    writer.write_at(0, memoryview(bytes(num_bytes)))
    writer.abort()
    del writer
    gc.collect()  # an abandoned file object must not publish itself
    for other in (store, open_it()):
        assert other.child("a").list_files() == {}
        with pytest.raises(NotFoundError):
            other.read("a/k")
    put(store, "a/k", b"second")
    assert store.read("a/k") == b"second"


# --- create-only ---


@pytest.mark.parametrize("make", [lambda s, d: s.create("a/k", d), lambda s, d: put(s, "a/k", d)])
def test_existing_keys_are_never_overwritten(open_it: OpenStore, make: Callable[..., None]) -> None:
    """A second writer of a key is told so, whoever it is, and the first one's bytes stay."""
    for first in (b"", b"first"):
        store = open_it()
        make(store, first)
        for other in (store, open_it()):
            with pytest.raises(AlreadyCommittedError) as caught:
                other.create("a/k", b"second")
            assert isinstance(caught.value, FileExistsError)
            with pytest.raises(AlreadyCommittedError):
                other.write("a/k", 6)
            assert other.read("a/k") == first
        assert store.child("a").list_files() == {"k": len(first)}
        store.delete("a/k")


def race(stores: Sequence[Store], key: str) -> list[int]:
    """Let all stores create ``key`` at once; return who won."""
    start = threading.Barrier(len(stores))
    winners: list[int] = []

    def compete(i: int) -> None:
        start.wait()
        with contextlib.suppress(AlreadyCommittedError):
            stores[i].create(key, b"%d" % i * 1000)
            winners.append(i)

    with ThreadPoolExecutor(len(stores)) as threads:
        list(threads.map(compete, range(len(stores))))
    return winners


def refuse_links(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def test_what_is_larger_than_expected_is_refused(store: Store) -> None:
    """An object of as many bytes as its reader allows is read, a larger one is damage."""
    store.create("k", DATA[:100])
    assert store.read("k", 100) == DATA[:100]
    with pytest.raises(CorruptCheckpointError, match="100 bytes, at most 99 expected"):
        store.read("k", 99)


@pytest.fixture(params=["links", "no links"])
def local(
    request: pytest.FixtureRequest, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], LocalStore]:
    """Open a local store, on a mount with hard links and on one without."""
    if request.param == "no links":
        monkeypatch.setattr(os, "link", refuse_links)
    return lambda: LocalStore(str(tmp_path / "root"))


def test_of_two_creators_exactly_one_wins(local: Callable[[], LocalStore]) -> None:
    """Rivals that create a key at the same time agree on one winner, whose bytes are there, and no others."""
    for attempt in range(25):
        winners = race([local() for _ in range(6)], f"k{attempt}")
        assert len(winners) == 1
        assert local().read(f"k{attempt}") == b"%d" % winners[0] * 1000
    assert set(local().list_files()) == {f"k{i}" for i in range(25)}


def test_a_dead_creator_blocks_no_one(local: Callable[[], LocalStore]) -> None:
    """What a process leaves behind that died in the middle of a create is not in the way."""
    store = local()
    put(store, "k.claim", b"")
    put(store, "k.0123456789abcdef.tmp", b"half")
    store.create("k", b"whole")
    assert store.read("k") == b"whole"
    with pytest.raises(AlreadyCommittedError):
        store.create("k", b"again")


def test_create_leaves_only_the_object(local: Callable[[], LocalStore]) -> None:
    """No temporary file stays, whether the create succeeded or not."""
    store = local()
    store.create("a/k", b"1")
    with pytest.raises(AlreadyCommittedError):
        store.create("a/k", b"2")
    assert [p.name for p in pathlib.Path(store.url).rglob("*") if p.is_file()] == ["k"]


# --- looking around ---


def test_absent_keys_are_not_found(store: Store) -> None:
    """Every verb that needs an object says that it is not there, whether its folder is or not."""
    for neighbour in ("a/one", "a/two"):
        for verb in (
            lambda: store.read("a/none"),
            lambda: store.size("a/none"),
            lambda: read_part(store, "a/none", 0, 1),
        ):
            with pytest.raises(NotFoundError) as caught:
                verb()
            assert isinstance(caught.value, FileNotFoundError)
        store.create(neighbour, b"")


def test_absent_roots_are_empty(open_it: OpenStore) -> None:
    """Listing a root that does not exist, or a folder that does not, finds nothing and makes nothing."""
    store = open_it()
    for _ in range(2):
        assert store.list_files() == {}
        assert store.list_folders() == []
        assert store.child("a/b").list_files() == {}
        assert store.child("a/b").list_folders() == []


def test_listings_show_one_level(store: Store) -> None:
    """Files with their sizes, folders by name and sorted, nothing from further below."""
    for key, data in {
        "b": b"12",
        "a": b"",
        "z/deep/k": b"123",
        "c/k": b"1234",
        "c2/k": b"",
    }.items():
        put(store, key, data)
    assert store.list_files() == {"a": 0, "b": 2}
    assert store.list_folders() == ["c", "c2", "z"]
    assert store.child("z").list_folders() == ["deep"]
    assert store.child("z").list_files() == {}
    assert store.child("z/deep").list_files() == {"k": 3}
    assert store.child("z").child("deep").read("k") == b"123"


def test_a_root_that_is_an_object_is_an_error(store: Store) -> None:
    """What can be listed in no way is not taken for an empty folder."""
    store.create("k", b"data")
    for verb in (store.child("k").list_files, store.child("k").list_folders):
        with pytest.raises(StorageError):
            verb()


def test_others_see_commits_at_once(open_it: OpenStore) -> None:
    """No instance answers from what it has seen before."""
    mine, theirs = open_it(), open_it()
    assert mine.list_files() == {}
    assert mine.child("step").list_files() == {}
    theirs.create("step/manifest", b"one")
    assert mine.list_folders() == ["step"]
    assert mine.child("step").list_files() == {"manifest": 3}
    assert mine.size("step/manifest") == 3
    assert mine.read("step/manifest") == b"one"
    theirs.delete("step/manifest")
    put(theirs, "step/manifest", b"three")
    assert mine.child("step").list_files() == {"manifest": 5}
    assert mine.size("step/manifest") == 5
    assert mine.read("step/manifest") == b"three"
    put(theirs, "note", b"")
    assert mine.list_files() == {"note": 0}
    theirs.delete("note")
    put(theirs, "note", b"longer")
    assert mine.size("note") == 6
    assert mine.list_files() == {"note": 6}
    with pytest.raises(AlreadyCommittedError):
        mine.create("note", b"x")


def test_deleting_is_idempotent(open_it: OpenStore) -> None:
    """A deleted key is gone for all; deleting it again, or what never was, is no error."""
    store = open_it()
    put(store, "a/b/k", b"1")
    put(store, "a/b/other", b"2")
    for _ in range(2):
        store.delete("a/b/k")
        store.delete("never/was")
        for other in (store, open_it()):
            assert other.child("a/b").list_files() == {"other": 1}
    store.create("a/b/k", b"3")
    assert store.read("a/b/k") == b"3"


def test_errors_say_where(store: Store) -> None:
    """The key is in the message and on the error."""
    with pytest.raises(NotFoundError) as caught:
        store.read("a/none")
    assert "a/none" in str(caught.value)
    assert str(caught.value.key).endswith("a/none")


# --- local files ---


def test_files_that_vanish_while_listing_are_not_listed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A temporary file that its creator removes in the middle of a listing does not fail it."""
    store = LocalStore(str(tmp_path))
    put(store, "stays", b"1")
    put(store, "goes", b"2")
    scandir = os.scandir

    @contextlib.contextmanager
    def scan_slowly(path: str) -> Iterator[Any]:
        with scandir(path) as entries:
            found = list(entries)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(tmp_path / "goes")
        yield iter(found)

    monkeypatch.setattr(os, "scandir", scan_slowly)
    assert store.list_files() == {"stays": 1}


@contextlib.contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Let the system refuse larger files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def check_refused_by_the_system(store: LocalStore, num_bytes: int, number: int) -> None:
    """Both ways to write fail with the system's error, which is mapped, and nothing stays."""
    for write in (
        lambda: store.write("a/k", num_bytes),
        lambda: store.create("a/k", bytes(num_bytes)),
    ):
        with pytest.raises(StorageError) as caught:
            write()
        assert os.strerror(number) in str(caught.value)
        assert not caught.value.retryable
        assert store.child("a").list_files() == {}


def test_files_beyond_the_limit_are_refused(tmp_path: pathlib.Path) -> None:
    """A file that the system does not let grow is an error before the first byte."""
    with file_size_limit(100_000):
        check_refused_by_the_system(LocalStore(str(tmp_path)), 200_000, errno.EFBIG)
    put(LocalStore(str(tmp_path)), "a/k", bytes(200_000))


@pytest.fixture
def small_disk(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A file system of one megabyte."""
    mounted = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if (
        os.geteuid() != 0
        or subprocess.run(mounted, capture_output=True, check=False).returncode != 0
    ):
        pytest.skip("mounting a small disk is not permitted here")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_a_full_disk_is_an_error(small_disk: pathlib.Path) -> None:
    """No space left is an error of the store, and what did not fit is removed."""
    store = LocalStore(str(small_disk))
    check_refused_by_the_system(store, 2 * 2**20, errno.ENOSPC)
    with pytest.raises(StorageError, match="No space left"):
        write_blocks(store, bytes(2 * 2**20))
    assert store.child("a").list_files() == {}
    put(store, "a/k", bytes(2**19))


# --- any filesystem ---


def test_errors_of_client_libraries_are_mapped() -> None:
    """Whatever a filesystem raises comes as an error of the store, never as absence."""
    store = FsspecStore("broken://root")
    for verb in (
        lambda: store.read("k"),
        lambda: store.size("k"),
        lambda: store.list_files(),
        lambda: store.list_folders(),
        lambda: store.delete("k"),
        lambda: store.write("k", 1),
        lambda: store.create("k", b""),
        lambda: read_part(store, "k", 0, 1),
    ):
        with pytest.raises(StorageError, match="RuntimeError: no answer"):
            verb()


def test_create_asks_the_filesystem_for_a_conditional_write() -> None:
    """A rival that comes between the look and the write is not overwritten."""
    root = uuid.uuid4().hex

    class Rival(FsspecStore):
        def size(self, key: str) -> int:
            try:
                return super().size(key)
            finally:
                FsspecStore(self.url)._fs.pipe_file(self._path(key), b"rival")

    store = Rival(f"objects://{root}")
    with pytest.raises(AlreadyCommittedError):
        store.create("k", b"mine")
    assert store.read("k") == b"rival"


# --- from what a user writes ---


def test_paths_open_local_stores(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths as text or objects, relative or not, and file URLs are one and the same local store."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    root = tmp_path / "run"
    for url in (
        root,
        str(root),
        f"{root}/",
        f"file://{root}",
        f"local://{root}",
        "run",
        pathlib.Path("run"),
        "~/run",
    ):
        store = open_store(url)
        assert isinstance(store, LocalStore)
        assert store.url == str(root)
    assert not root.exists()
    odd = open_store(tmp_path / "a:b" / "c d%20")
    odd.create("k", b"1")
    assert (tmp_path / "a:b" / "c d%20" / "k").read_bytes() == b"1"


def test_urls_open_the_filesystem_they_name() -> None:
    """Any protocol of fsspec works, with a root, below one, and with none."""
    root = uuid.uuid4().hex
    for url in (f"memory://{root}", f"memory://{root}/", f"memory:///{root}"):
        store = open_store(url)
        assert isinstance(store, FsspecStore)
        store.create(f"{uuid.uuid4().hex}/k", b"1")
        assert len(open_store(f"memory://{root}").list_folders()) == len(store.list_folders()) > 0
    bare = open_store("memory://")
    assert root in bare.list_folders()
    assert bare.child(root).list_folders() == open_store(f"memory://{root}").list_folders()
    assert isinstance(open_store("file:///tmp/x", endpoint="of S3"), LocalStore)


@pytest.mark.parametrize(
    "url",
    [
        "", b"/tmp/run", "nosuchprotocol://run", "s3:/bucket/run", "memory:/run", "file:/tmp/run",
        pathlib.PurePosixPath("s3://bucket/run"), pathlib.Path("memory://run"), pathlib.PurePath("gs+x://b"),
    ],
)  # fmt: skip
def test_what_is_no_place_is_refused(url: Any) -> None:
    """Unknown protocols, and URLs that lost a slash in ``pathlib``, are errors and not new folders."""
    with pytest.raises(StorageError):
        open_store(url)


# --- shards ---

BLOCK = 1000
HEADER = 4096


def image_of(data: bytes) -> memoryview:
    return memoryview(bytearray(HEADER) + data)


def seal(digests: Sequence[str]) -> bytes:
    """A header that says the digests."""
    return ",".join(digests).encode().ljust(HEADER)


def write_blocks(store: Store, data: bytes, key: str = "a/shard", **options: Any) -> str:
    image = image_of(data)
    return write_shard(
        store.write(key, len(image)),
        image,
        data_offset=HEADER,
        block_bytes=BLOCK,
        **({"seal": seal, "num_threads": store.concurrency} | options),
    )


def read_blocks(
    store: Store,
    data: bytes,
    ranges: Sequence[tuple[int, int]],
    key: str = "a/shard",
    num_threads: int = 2,
) -> bytearray:
    """Read ranges of a shard that should hold ``data``."""
    buffer = bytearray(len(data))
    read_ranges(
        store,
        key,
        ranges,
        memoryview(buffer),
        data_offset=HEADER,
        block_bytes=BLOCK,
        digests=[digest(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)],
        explain=lambda start, stop: f"w[{start}:{stop}]",
        num_threads=num_threads,
    )
    return buffer


@pytest.mark.parametrize("num_threads", [1, 4])
@pytest.mark.parametrize("size", [0, 1, BLOCK, len(DATA)])
def test_shards_read_back(store: Store, size: int, num_threads: int) -> None:
    """A shard is its header, which holds the digests of its blocks, and its data."""
    data = DATA[:size]
    header_digest = write_blocks(store, data, num_threads=num_threads)
    content = store.read("a/shard")
    digests = content[:HEADER].decode().strip().split(",")
    assert digests == ([digest(data[at : at + BLOCK]) for at in range(0, size, BLOCK)] or [""])
    assert content[HEADER:] == data
    assert header_digest == digest(content[:HEADER])
    assert read_blocks(store, data, [(0, size)] if size else [], num_threads=num_threads) == data


def test_reads_touch_only_what_was_asked_for(store: Store) -> None:
    """Ranges land in their own place; the rest of the buffer is left alone."""
    write_blocks(store, DATA)
    ranges = [(0, BLOCK), (3 * BLOCK, 5 * BLOCK), (8 * BLOCK, len(DATA))]
    expected = bytearray(len(DATA))
    for start, stop in ranges:
        expected[start:stop] = DATA[start:stop]
    assert read_blocks(store, DATA, ranges) == expected


def test_shards_are_written_once(store: Store) -> None:
    """A shard that exists is not written over."""
    write_blocks(store, DATA)
    with pytest.raises(AlreadyCommittedError):
        write_blocks(store, DATA[::-1])
    assert store.read("a/shard")[HEADER:] == DATA


@pytest.mark.parametrize("at", [0, 999, 1000, 4321, len(DATA) - 1])
def test_a_flipped_bit_is_found_and_explained(store: Store, at: int) -> None:
    """Reading the block fails, and says which bytes of the file and what they hold; others can be read."""
    write_blocks(store, DATA)
    content = bytearray(store.read("a/shard"))
    content[HEADER + at] ^= 1
    store.delete("a/shard")
    put(store, "a/shard", bytes(content))
    block = at // BLOCK
    start, stop = block * BLOCK, min((block + 1) * BLOCK, len(DATA))
    with pytest.raises(CorruptCheckpointError) as caught:
        read_blocks(store, DATA, [(0, len(DATA))])
    assert f"bytes {HEADER + start} to {HEADER + stop} are damaged" in str(caught.value)
    assert f"w[{start}:{stop}]" in str(caught.value)
    assert caught.value.key == "a/shard"
    rest = [span for span in ((0, start), (stop, len(DATA))) if span[0] < span[1]]
    read_blocks(store, DATA, rest)


def test_a_short_shard_is_an_error(store: Store) -> None:
    """A shard that ends too early fails the read of what is missing, and only that."""
    put(store, "a/shard", bytes(HEADER) + DATA[: 3 * BLOCK])
    read_blocks(store, DATA, [(0, 3 * BLOCK)])
    with pytest.raises(StorageError):
        read_blocks(store, DATA, [(2 * BLOCK, 4 * BLOCK)])
    with pytest.raises(NotFoundError):
        read_blocks(store, DATA, [(0, BLOCK)], key="a/none")


class FailingWriter:
    """Passes calls on, but fails one of them."""

    def __init__(self, writer: ObjectWriter, fault: FailingStore) -> None:
        self._writer = writer
        self._fault = fault
        self.ordered = writer.ordered
        self.part_bytes = writer.part_bytes

    def flush(self) -> None:
        self._writer.flush()

    def write_at(self, byte_offset: int, data: memoryview) -> None:
        self._fault.tick("write_at")
        self._writer.write_at(byte_offset, data)

    def commit(self) -> None:
        self._fault.tick("commit")
        self._writer.commit()

    def abort(self) -> None:
        self._writer.abort()
        self._fault.tick("abort")


class FailingStore:
    """A store of which one call fails; ``fired`` tells whether it did."""

    def __init__(self, store: Store, verb: str, number: int, error: BaseException) -> None:
        self._store = store
        self._verb, self._number, self._error = verb, number, error
        self._lock = threading.Lock()
        self._count = 0
        self.fired = False

    def tick(self, verb: str) -> None:
        with self._lock:
            self._count += verb == self._verb
            fails = verb == self._verb and self._count == self._number
        if fails:
            self.fired = True
            raise self._error

    def write(self, key: str, num_bytes: int) -> FailingWriter:
        return FailingWriter(self._store.write(key, num_bytes), self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.mark.parametrize(("verb", "number"), [("write_at", 1), ("write_at", 2), ("commit", 1)])
@pytest.mark.parametrize(
    "error", [StorageError("no space"), ZeroDivisionError(), KeyboardInterrupt()], ids=repr
)
def test_a_failing_write_fails_the_shard(
    store: Store, verb: str, number: int, error: BaseException
) -> None:
    """A failure on any thread, in any call, fails the whole write, and no file stays."""
    failing = FailingStore(store, verb, number, error)
    with pytest.raises(type(error)) as caught:
        write_blocks(failing, DATA, num_threads=3)  # type: ignore[arg-type]  # a store by its verbs
    assert failing.fired
    assert caught.value is error
    gc.collect()
    assert store.child("a").list_files() == {}
    write_blocks(store, DATA)
    assert read_blocks(store, DATA, [(0, len(DATA))]) == DATA


def test_a_failing_header_fails_the_shard(store: Store) -> None:
    """No file stays without its header."""

    def break_down(digests: Sequence[str]) -> bytes:
        raise CheckpointError("too large")

    with pytest.raises(CheckpointError, match="too large"):
        write_blocks(store, DATA, seal=break_down)
    assert store.child("a").list_files() == {}


def test_the_first_error_is_the_one_reported(store: Store) -> None:
    """Where cleaning up fails as well, the error that made it necessary is what the caller gets."""
    failing = FailingStore(store, "abort", 1, StorageError("gone"))

    def break_down(digests: Sequence[str]) -> bytes:
        raise CheckpointError("first")

    with pytest.raises(CheckpointError, match="first"):
        write_blocks(failing, DATA, seal=break_down)  # type: ignore[arg-type]  # a store by its verbs
    assert failing.fired


def test_a_full_disk_under_one_thread_fails_the_shard(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where space cannot be reserved, the thread that meets the end of the disk fails the write."""

    def cannot_reserve(*args: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", cannot_reserve)
    store = LocalStore(str(tmp_path))
    with file_size_limit(HEADER + 5 * BLOCK), pytest.raises(StorageError, match="File too large"):
        write_blocks(store, DATA, num_threads=4)
    assert store.child("a").list_files() == {}
