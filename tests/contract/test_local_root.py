"""Local files: nothing outside the root is read, written or deleted."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp_ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    StorageError,
)
from fsdp_ckpt.storage.local import LocalStore
from tests.local_files import (
    image_of,
    put,
)

VERBS: dict[str, Callable[[LocalStore, str], object]] = {
    "read": lambda store, key: store.read(key),
    "read_into": lambda store, key: store.read_into(key, 0, memoryview(bytearray(3))),
    "size": lambda store, key: store.size(key),
    "write": lambda store, key: store.write(key, 3),
    "create": lambda store, key: store.create(key, b"new"),
    "delete": lambda store, key: store.delete(key),
    "read below": lambda store, key: store.child(key).read("k"),
    "list": lambda store, key: store.child(key).list_files(),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    "key",
    ["../secret", "a/../../secret", "{}/secret", "..", ".", "", "a//k", "a/", "a/./k", "k\0x"],
)
def test_keys_that_lead_out_are_refused(tmp_path: Path, key: str, verb: str) -> None:
    """And so are all that are not one plain name after another: each object has one key."""
    root = tmp_path / "root"
    put(LocalStore(str(root)), "a/k", image_of(3))
    (tmp_path / "secret").write_bytes(b"yes")
    with pytest.raises(CorruptCheckpointError):
        VERBS[verb](LocalStore(str(root)), key.format(tmp_path))
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a", "k", "root", "secret"]


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder beside the root, which holds links to it and to its file; the root has links of its own."""
    root, outside = tmp_path / "root", tmp_path / "root-of-another"
    for folder in (root / "a", outside / "b"):
        folder.mkdir(parents=True)
        (folder / "k").write_bytes(b"yes")
    (root / "folder").symlink_to(outside)
    (root / "relative").symlink_to("../root-of-another")
    (root / "a" / "file").symlink_to(outside / "b" / "k")
    (root / "twice").symlink_to("folder/b")
    (root / "inner").symlink_to("a")
    (root / "a" / "inner-file").symlink_to(root / "a" / "k")
    return outside


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("key", ["folder/b/k", "relative/b/k", "twice/k"])
def test_links_that_lead_out_are_refused(outside: Path, key: str, verb: str) -> None:
    """Through a folder on the way, from the root or from a store below it; nothing outside changes."""
    store = LocalStore(str(outside.parent / "root"))
    first, _, rest = key.partition("/")
    with pytest.raises(CorruptCheckpointError, match="root-of-another"):
        VERBS[verb](store, key)
    with pytest.raises(CorruptCheckpointError, match="root-of-another"):
        VERBS[verb](store.child(first), rest)
    assert sorted(p.name for p in outside.rglob("*")) == ["b", "k"]
    assert (outside / "b" / "k").read_bytes() == b"yes"


def test_files_that_are_links_out_are_not_read(outside: Path) -> None:
    """Nor overwritten; deleting such a link deletes the link."""
    store = LocalStore(str(outside.parent / "root"))
    for verb in ("read", "read_into", "size"):
        with pytest.raises(CorruptCheckpointError):
            VERBS[verb](store, "a/file")
    for verb in ("write", "create"):
        with pytest.raises(CheckpointError):
            VERBS[verb](store, "a/file")
    store.delete("a/file")
    assert not (outside.parent / "root" / "a" / "file").is_symlink()
    assert (outside / "b" / "k").read_bytes() == b"yes"


def test_links_that_stay_inside_are_followed(outside: Path) -> None:
    """And the root itself may be reached through any."""
    (outside.parent / "link").symlink_to("root")
    for name in ("root", "link"):
        store = LocalStore(str(outside.parent / name))
        for key in ("a/k", "inner/k", "a/inner-file", "inner/inner-file"):
            assert store.read(key) == b"yes"
        assert store.child("inner").size("k") == 3
    opened = LocalStore(str(outside.parent / "root" / "folder"))
    assert opened.read("b/k") == b"yes"
    assert opened.child("b").list_files() == {"k": 3}


def test_what_is_not_a_file_is_not_read(tmp_path: Path) -> None:
    """A named pipe does not make the reader wait, nor is a folder a file."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    store = LocalStore(str(tmp_path), direct=True)
    for key in ("pipe", "folder"):
        for verb in ("read", "read_into"):
            with pytest.raises(StorageError, match="not a file"):
                VERBS[verb](store, key)
