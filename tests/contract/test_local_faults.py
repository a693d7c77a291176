"""Local files: failures are told and leave nothing, and rivals agree on a winner."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp_ckpt.errors import (
    AlreadyCommittedError,
    StorageError,
)
from fsdp_ckpt.storage.local import LocalStore
from fsdp_ckpt.storage.shard_io import write_shard
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


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return needs_direct(tmp_path)


@pytest.mark.parametrize("direct", WAYS)
def test_a_full_disk_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool | None
) -> None:
    """Also where the space cannot be reserved, and the disk is full in the middle of the file."""

    def refuse(*args: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with mounted("tmpfs", tmp_path, "-o", f"size={4 * BLOCK}"):
        store = LocalStore(str(tmp_path), direct=direct)
        free = os.statvfs(tmp_path).f_bfree
        for num_threads in (1, 2):
            image = image_of(PAGE + 8 * BLOCK)
            with pytest.raises(StorageError, match="No space left") as caught:
                write_shard(
                    store.write("a/shard", len(image)),
                    image,
                    data_offset=PAGE,
                    block_bytes=BLOCK,
                    seal=lambda digests: bytes(PAGE),
                    num_threads=num_threads,
                )
            assert not caught.value.retryable
            assert store.child("a").list_files() == {}
            assert os.statvfs(tmp_path).f_bfree >= free - 1  # but for the folder
        put(store, "a/shard", image_of(2 * BLOCK))


@pytest.mark.parametrize(
    ("verb", "number"),
    [
        *(("pwrite", number) for number in (errno.ENOSPC, errno.EIO)),
        *(("fsync", number) for number in (errno.ENOSPC, errno.EIO)),
        ("open", errno.EMFILE),
        ("posix_fallocate", errno.ENOSPC),
    ],
)
def test_errors_of_the_system_are_told(
    disk: Path, monkeypatch: pytest.MonkeyPatch, verb: str, number: int
) -> None:
    """On the direct descriptor too, where nothing but a refusal is passed over; no file stays."""
    function, fired = getattr(os, verb), []

    def fail(target: Any, *args: Any) -> Any:
        if verb == "open":
            is_due = bool(args[0] & os.O_DIRECT)
        else:
            is_due = verb != "pwrite" or is_direct(target)
            is_due = is_due and os.path.isfile(f"/proc/self/fd/{target}")
        if is_due:
            fired.append(target)
            raise OSError(number, os.strerror(number))
        return function(target, *args)

    monkeypatch.setattr(os, verb, fail)
    store = LocalStore(str(disk))
    with pytest.raises(StorageError, match=os.strerror(number)) as caught:
        round_trip(store)
    assert fired
    assert caught.value.retryable is (number == errno.EIO)
    monkeypatch.undo()
    assert store.child("a").list_files() == {}
    round_trip(store)


def test_data_is_durable_before_the_header_and_both_before_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut leaves no header without its data, and no committed file without its header."""
    order: list[str] = []

    def watch(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(fd: int, *args: Any) -> Any:
            what = "the folder" if os.path.isdir(f"/proc/self/fd/{fd}") else "the file"
            if name == "pwrite":
                what = "data" if args[1] else "the header"
            result = function(fd, *args)
            order.append(f"{name} {what}")
            return result

        return call

    store = LocalStore(str(tmp_path))
    store.create("a/note", b"")
    for name in ("pwrite", "fsync"):
        monkeypatch.setattr(os, name, watch(name, getattr(os, name)))
    image = image_of(PAGE + BLOCK)
    write_shard(
        store.write("a/shard", len(image)),
        image,
        data_offset=PAGE,
        block_bytes=BLOCK,
        seal=lambda digests: bytes(PAGE),
        num_threads=1,
    )
    durable = ["fsync the file", "pwrite the header", "fsync the file", "fsync the folder"]
    assert order == ["pwrite data", *durable]


def test_descriptors_are_closed(tmp_path: Path) -> None:
    """Within 256 descriptors: many files, written, aborted, refused and read by several threads."""
    script = """
import contextlib, os, resource, sys
from concurrent.futures import ThreadPoolExecutor
from fsdp_ckpt.errors import CheckpointError
from fsdp_ckpt.storage.local import LocalStore

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
store = LocalStore(sys.argv[1], direct=True)
data = memoryview(bytes(10_000))

def use(i):
    for end in ("abort", "commit"):
        writer = store.write(f"a/{i}", len(data))
        writer.write_at(0, data)
        getattr(writer, end)()
    for key, size in ((f"a/{i}", 10_001), (f"a/{i}/x", 1), ("a", 1), ("a/none", 1)):
        with contextlib.suppress(CheckpointError):
            store.read_into(key, 0, memoryview(bytearray(size)))
            raise AssertionError(key)
    with contextlib.suppress(CheckpointError):
        store.write(f"a/{i}", 1)
        raise AssertionError("written twice")
    store.read_into(f"a/{i}", 0, memoryview(bytearray(10_000)))
    store.create(f"a/{i}.json", data)
    assert store.read(f"a/{i}.json") == data

before = len(os.listdir("/proc/self/fd"))
with ThreadPoolExecutor(8) as threads:
    list(threads.map(use, range(300)))
assert len(os.listdir("/proc/self/fd")) == before
"""
    done = subprocess.run([sys.executable, "-c", script, tmp_path], check=False, timeout=250)
    assert done.returncode == 0


# --- mounts without hard links ---


@pytest.mark.parametrize(
    "number",
    [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES, errno.ENOSPC],
)
def test_only_a_refused_link_is_replaced_by_a_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Any other failure of ``link`` is the store's; neither leaves more than the object."""

    def refuse(*args: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    store = LocalStore(str(tmp_path))
    if number == errno.ENOSPC:
        with pytest.raises(StorageError, match="No space left"):
            store.create("k", b"1")
        assert os.listdir(tmp_path) == []
        return
    store.create("k", b"1")
    with pytest.raises(AlreadyCommittedError):
        store.create("k", b"2")
    assert store.read("k") == b"1"
    assert os.listdir(tmp_path) == ["k"]


@pytest.mark.parametrize("links", [True, False])
def test_of_rival_processes_one_wins(tmp_path: Path, links: bool) -> None:
    """Each key is created by exactly one process, with hard links and without."""
    script = """
import errno, os, sys
from fsdp_ckpt.errors import AlreadyCommittedError
from fsdp_ckpt.storage.local import LocalStore

def refuse(*args):
    raise OSError(errno.EPERM, "no links here")

root, me, links = sys.argv[1:]
if links == "False":
    os.link = refuse
print("ready", flush=True)
sys.stdin.readline()
won = []
for i in range(30):
    try:
        LocalStore(root).create(f"k{i}", me.encode() * 1000)
        won.append(i)
    except AlreadyCommittedError:
        pass
print(*won)
"""
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", script, str(tmp_path)]
    rivals: list[Any] = [
        subprocess.Popen([*command, str(i), str(links)], **pipes) for i in range(3)
    ]
    for rival in rivals:
        assert rival.stdout.readline() == "ready\n"
    for rival in rivals:
        rival.stdin.write("go\n")
        rival.stdin.flush()
    won = [rival.communicate(timeout=250)[0].split() for rival in rivals]
    assert [rival.returncode for rival in rivals] == [0, 0, 0]
    assert sorted(int(i) for keys in won for i in keys) == list(range(30))
    for i, keys in enumerate(won):
        for key in keys:
            assert (tmp_path / f"k{key}").read_bytes() == b"%d" % i * 1000
    assert len(os.listdir(tmp_path)) == 30
