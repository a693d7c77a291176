"""Files that are written before they have a name: nobody sees them until then, and nothing of them stays."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest

from fsdp_ckpt.errors import AlreadyCommittedError, CorruptCheckpointError, StorageError
from fsdp_ckpt.storage.fsspec_store import FsspecStore
from fsdp_ckpt.storage.local import LocalStore
from fsdp_ckpt.storage.store import Store
from fsdp_ckpt.writer import FileName, ProcessWriter, ShardWriter, ThreadWriter, WriteJob
from fsdp_ckpt.writer.job import NO_DIGEST
from tests.local_files import BLOCK, PAGE, WAYS, image_of, mounted
from tests.roots import tree

PATIENCE_S = 60.0
NAME = FileName("a/b/shard", digests_at=0)
NUM_BYTES = PAGE + 3 * BLOCK


@pytest.mark.parametrize("direct", WAYS)
def test_a_file_is_there_from_its_name_on(tmp_path: Path, direct: bool | None) -> None:
    """Its bytes of before and after."""
    store, image = LocalStore(str(tmp_path), direct=direct), image_of(NUM_BYTES)
    writer = store.write_unnamed(NUM_BYTES)
    assert writer is not None
    writer.write_at(PAGE, image[PAGE:])
    writer.flush()
    assert tree(store) == set()
    writer.name("a/b/shard")
    writer.write_at(0, image[:PAGE])
    writer.commit()
    assert tree(store) == {"a/b/shard"}
    assert store.read("a/b/shard") == image


def test_it_has_the_permissions_of_any_other(tmp_path: Path) -> None:
    """As the program's umask says."""
    store = LocalStore(str(tmp_path))
    before = os.umask(0o027)
    try:
        named, unnamed = store.write("a", 1), store.write_unnamed(1)
    finally:
        os.umask(before)
    assert unnamed is not None
    unnamed.name("b")
    for writer in (named, unnamed):
        writer.commit()
    assert (tmp_path / "b").stat().st_mode == (tmp_path / "a").stat().st_mode


def test_a_name_is_taken_once(tmp_path: Path) -> None:
    """What has it stays as it is, also when the other one is given up."""
    store = LocalStore(str(tmp_path))
    store.create("a/k", b"first")
    writer = store.write_unnamed(6)
    assert writer is not None
    writer.write_at(0, memoryview(b"second"))
    with pytest.raises(AlreadyCommittedError):
        writer.name("a/k")
    writer.abort()
    assert store.read("a/k") == b"first"


def test_no_name_leads_out_of_the_root(tmp_path: Path) -> None:
    """Neither by its parts nor by a symbolic link."""
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path)
    store = LocalStore(str(tmp_path / "root"))
    for key in ("../k", "link/k"):
        writer = store.write_unnamed(1)
        assert writer is not None
        with pytest.raises(CorruptCheckpointError):
            writer.name(key)
        writer.abort()
    assert not (tmp_path / "k").exists()


@pytest.mark.parametrize("is_named", [False, True])
def test_what_is_given_up_gives_its_space_back(tmp_path: Path, is_named: bool) -> None:
    """All of it, and its descriptors."""
    with mounted("tmpfs", tmp_path, "-o", f"size={2 * NUM_BYTES}"):
        store = LocalStore(str(tmp_path))
        free, descriptors = os.statvfs(tmp_path).f_bfree, len(os.listdir("/proc/self/fd"))
        writer = store.write_unnamed(NUM_BYTES)
        assert writer is not None
        assert os.statvfs(tmp_path).f_bfree <= free - NUM_BYTES // PAGE
        if is_named:
            writer.name("k")
        writer.abort()
        assert os.statvfs(tmp_path).f_bfree == free
        assert len(os.listdir("/proc/self/fd")) == descriptors
        assert tree(store) == set()


def test_without_room_or_a_root_there_is_none(tmp_path: Path) -> None:
    """Who then writes it under its name hears why not."""
    assert LocalStore(str(tmp_path / "absent")).write_unnamed(1) is None
    with mounted("tmpfs", tmp_path, "-o", f"size={NUM_BYTES // 2}"):
        store, descriptors = LocalStore(str(tmp_path)), len(os.listdir("/proc/self/fd"))
        assert store.write_unnamed(NUM_BYTES) is None
        assert len(os.listdir("/proc/self/fd")) == descriptors
        with pytest.raises(StorageError, match="No space left"):
            store.write("k", NUM_BYTES)


# --- the writers ---

Writers = Callable[[], ShardWriter]


def begin(
    writer: ShardWriter, store: Store, image: memoryview, fd: int = -1, name: FileName | None = None
) -> Any:
    """Have an image written, of which all but the first block is filled."""
    job = WriteJob(
        num_bytes=len(image), data_offset=PAGE, block_bytes=BLOCK, num_threads=2, url=store.url
    )
    image[: PAGE // len(NO_DIGEST) * len(NO_DIGEST)] = NO_DIGEST.encode() * (PAGE // len(NO_DIGEST))
    pending = writer.submit(job, image, fd, store, name)
    pending.filled(len(image) - BLOCK)
    return pending


def outcome(future: Future[str]) -> str:
    """Return how a write ended."""
    wait([future], PATIENCE_S)
    error = future.exception(0)
    return "written" if error is None else str(error)


@pytest.fixture
def shared_image() -> Iterator[tuple[memoryview, int]]:
    """An image that another process can be given, with its descriptor."""
    fd = os.memfd_create("image")
    os.truncate(fd, NUM_BYTES)
    image = memoryview(mmap.mmap(fd, NUM_BYTES))
    image[:] = image_of(NUM_BYTES)
    yield image, fd
    os.close(fd)


@pytest.mark.parametrize("kind", [ThreadWriter, ProcessWriter])
def test_writers_begin_before_the_name_is_known(
    tmp_path: Path, kind: Writers, shared_image: tuple[memoryview, int]
) -> None:
    """The file is the same as one that had its name at once."""
    image, fd = shared_image
    store, writer = LocalStore(str(tmp_path)), kind()
    now = begin(writer, store, image, fd, FileName("now", digests_at=0))
    now.filled(len(image))
    later = begin(writer, store, image, fd)
    later.name(NAME)
    later.filled(len(image))
    assert outcome(now.future) == outcome(later.future) == "written"
    assert now.future.result() == later.future.result()
    assert store.read(NAME.key) == store.read("now")
    writer.close()


@pytest.mark.parametrize("kind", [ThreadWriter, ProcessWriter])
def test_what_does_not_come_about_leaves_nothing(
    tmp_path: Path, kind: Writers, shared_image: tuple[memoryview, int]
) -> None:
    """Neither a file nor its space; the writer goes on with the next one."""
    image, fd = shared_image
    with mounted("tmpfs", tmp_path, "-o", f"size={3 * NUM_BYTES // 2}"):
        store, writer = LocalStore(str(tmp_path)), kind()
        for _ in range(3):
            pending = begin(writer, store, image, fd)
            pending.fail(StorageError("no agreement"))
            assert "no agreement" in outcome(pending.future)
            assert tree(store) == set()
        last = begin(writer, store, image, fd)
        last.name(NAME)
        last.filled(len(image))
        assert outcome(last.future) == "written"
        writer.close()


def test_a_trainer_that_is_gone_leaves_nothing_without_a_name(
    tmp_path: Path, shared_image: tuple[memoryview, int]
) -> None:
    """Its writer ends, and the file with it."""
    image, fd = shared_image
    store, writer = LocalStore(str(tmp_path)), ProcessWriter()
    pending = begin(writer, store, image, fd)
    writer.close()
    assert "the training process is gone" in outcome(pending.future)
    assert tree(store) == set()


@pytest.mark.parametrize("number", [errno.EPERM, errno.EXDEV, errno.ENOENT])
def test_a_file_system_may_refuse_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The file is then written anew, under its name."""
    refused = []

    def refuse(*args: Any, **kwargs: Any) -> None:
        refused.append(args)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    store, writer = LocalStore(str(tmp_path)), ThreadWriter()
    names = [NAME, FileName("a/b/another", digests_at=0)]
    for name in names:
        image = image_of(NUM_BYTES)
        pending = begin(writer, store, image)
        pending.name(name)
        pending.filled(len(image))
        assert outcome(pending.future) == "written"
        assert store.read(name.key) == image
    assert len(refused) == 1  # not tried again
    assert tree(store) == {name.key for name in names}
    writer.close()


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    """As an error of the store, which names the path."""
    store = LocalStore(str(tmp_path))
    store.create("a", b"no folder")
    writer = store.write_unnamed(1)
    assert writer is not None
    with pytest.raises(StorageError, match=f"{tmp_path}/a/b/shard"):
        writer.name(NAME.key)
    writer.abort()


def test_a_file_system_may_have_no_files_without_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS has none; and a store may be no file system at all."""
    function = os.open

    def refuse(path: Any, flags: int, *args: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return function(path, flags, *args)

    monkeypatch.setattr(os, "open", refuse)
    stores: list[Store] = [LocalStore(str(tmp_path)), FsspecStore(f"memory://{tmp_path}")]
    for store in stores:
        writer, image = ThreadWriter(), image_of(NUM_BYTES)
        pending = begin(writer, store, image)
        assert tree(store) == set()
        pending.name(NAME)
        pending.filled(len(image))
        assert outcome(pending.future) == "written"
        assert store.read(NAME.key) == image
        writer.close()


def test_a_name_that_is_taken_fails_the_write(tmp_path: Path) -> None:
    """Nothing is written anew, nor is what is there touched."""
    store, writer, image = LocalStore(str(tmp_path)), ThreadWriter(), image_of(NUM_BYTES)
    store.create(NAME.key, b"first")
    pending = begin(writer, store, image)
    pending.name(NAME)
    pending.filled(len(image))
    assert "exists already" in outcome(pending.future)
    assert store.read(NAME.key) == b"first"
    writer.close()


def test_the_name_is_durable_before_the_write_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut leaves no header without its data, no file whose folder does not know it when it counts."""
    order: list[str] = []

    def watch(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(target: Any, *args: Any, **kwargs: Any) -> Any:
            what = name
            if name == "pwrite":
                what = "data" if args[1] else "header"
            elif name == "fsync" and os.path.isdir(f"/proc/self/fd/{target}"):
                folder = os.readlink(f"/proc/self/fd/{target}")
                what = f"fsync {os.path.relpath(folder, tmp_path)}"
            elif name == "fsync":
                what = f"fsync the file of {os.fstat(target).st_nlink} names"
            result = function(target, *args, **kwargs)
            order.append(what)
            return result

        return call

    for name in ("pwrite", "fsync", "link"):
        monkeypatch.setattr(os, name, watch(name, getattr(os, name)))
    store, writer, image = LocalStore(str(tmp_path)), ThreadWriter(), image_of(NUM_BYTES)
    pending = begin(writer, store, image)
    pending.name(NAME)
    pending.filled(len(image))
    assert outcome(pending.future) == "written"
    writer.close()
    at = order.index("header")
    before, after = order[:at], order[at:]
    assert after == ["header", "fsync the file of 1 names", "fsync a/b"]
    assert before[-1] == "fsync the file of 1 names"
    assert [what for what in before[:-1] if what != "data"] == ["fsync .", "fsync a", "link"]
