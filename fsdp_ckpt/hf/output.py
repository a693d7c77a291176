"""The output folder, and how a run's files come to stand in it.

Invariant: at no moment can what stands in the folder be taken for a whole model that it is not. A file has
its final name only when it is whole; readers find shards through the index, which goes first when an older
run is removed and comes last when a new one is published.

    local     files are written in a hidden folder below, and renamed once all of them are whole: until then
              an older run stands untouched
    objects   a store has no rename, but an object appears only when it is complete: an older run is removed
              before the first new file is written

One run at a time: a second one into the same folder makes the first fail.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Protocol

from fsdp_ckpt.errors import AlreadyCommittedError, CheckpointError, NotFoundError
from fsdp_ckpt.storage.durable import fsync_dir
from fsdp_ckpt.storage.local import LocalStore, mapped_os_errors
from fsdp_ckpt.storage.store import ObjectWriter, Store

__all__ = ["OutputFolder", "open_output", "read_companions"]

INDEX_NAME = "model.safetensors.index.json"
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors", re.ASCII)
_PARTIAL = ".fsdp-ckpt-partial-"
_COMPANIONS = ("*.json", "*.txt", "*.model", "*.jinja")


class OutputFolder(Protocol):
    """Takes a run's files and ends with ``publish`` or ``discard``."""

    def write(self, name: str, num_bytes: int) -> ObjectWriter:
        """Start one of the files."""
        ...

    def publish(self, index: bytes | None) -> None:
        """Make the run's files, all whole by now, the folder's content; ``index`` comes last."""
        ...

    def discard(self) -> None:
        """Remove what this run has written; never raises an error of a store."""
        ...


def open_output(store: Store, companions: Mapping[str, bytes], *, overwrite: bool) -> OutputFolder:
    """Look at the output folder; changes nothing.

    Args:
        store: The folder.
        companions: Name → content of the small files that stand beside the weights.
        overwrite: Replace an older run.

    Raises:
        AlreadyCommittedError: It holds weights or other companions, and ``overwrite`` is false.
        StorageError: It cannot be read.
    """
    if not overwrite:
        _refuse_existing(store, companions)
    if isinstance(store, LocalStore):
        return _LocalFolder(store, companions, overwrite=overwrite)
    return _ObjectFolder(store, companions)


class _LocalFolder:
    def __init__(
        self, store: LocalStore, companions: Mapping[str, bytes], *, overwrite: bool
    ) -> None:
        self._store = store
        self._companions = companions
        self._overwrite = overwrite
        self._partial = store.child(f"{_PARTIAL}{uuid.uuid4().hex}")
        self._names: list[str] = []

    def write(self, name: str, num_bytes: int) -> ObjectWriter:
        if not self._names:
            self._remove_leftovers()
        self._names.append(name)
        return self._partial.write(name, num_bytes)

    def _remove_leftovers(self) -> None:
        """Remove what killed runs have left; no reader knows it, but it may take much space."""
        for name in self._store.list_folders():
            if name.startswith(_PARTIAL):
                shutil.rmtree(os.path.join(self._store.url, name), ignore_errors=True)

    def publish(self, index: bytes | None) -> None:
        if not self._overwrite:
            _refuse_existing(self._store, self._companions)  # since we looked, too
        for name, content in self._companions.items():
            self._partial.create(name, content)
        if index is not None:
            self._partial.create(INDEX_NAME, index)
        _remove_weights(self._store)
        with mapped_os_errors(self._store.url):
            # The older index is gone for good before a file that it names changes.
            fsync_dir(self._store.url)
            self._rename([*self._companions, *self._names])
            if index is not None:
                self._rename([INDEX_NAME])
            os.rmdir(self._partial.url)

    def _rename(self, names: Sequence[str]) -> None:
        """Give files their final names; they have them durably when this returns."""
        for name in names:
            os.rename(os.path.join(self._partial.url, name), os.path.join(self._store.url, name))
        fsync_dir(self._store.url)

    def discard(self) -> None:
        shutil.rmtree(self._partial.url, ignore_errors=True)


class _ObjectFolder:
    def __init__(self, store: Store, companions: Mapping[str, bytes]) -> None:
        self._store = store
        self._companions = companions
        self._names: list[str] = []

    def write(self, name: str, num_bytes: int) -> ObjectWriter:
        if not self._names:
            _remove_weights(self._store)
            self._put_companions()
        writer = self._store.write(name, num_bytes)
        self._names.append(name)
        return writer

    def _put_companions(self) -> None:
        there = self._store.list_files()
        for name, content in self._companions.items():
            if name in there:
                if self._store.read(name) == content:
                    continue
                self._store.delete(name)
            self._store.create(name, content)

    def publish(self, index: bytes | None) -> None:
        if index is not None:
            # Noted first: it may be there although the answer was lost, and is then the first to go.
            self._names.insert(0, INDEX_NAME)
            self._store.create(INDEX_NAME, index)

    def discard(self) -> None:
        for name in self._names:
            with suppress(CheckpointError):
                self._store.delete(name)


def _weights_in(store: Store) -> list[str]:
    """Return the names of an older run's files, the index first."""
    names = [name for name in store.list_files() if name == INDEX_NAME or _WEIGHTS.fullmatch(name)]
    return sorted(names, key=lambda name: (name != INDEX_NAME, name))


def _refuse_existing(store: Store, companions: Mapping[str, bytes]) -> None:
    weights = _weights_in(store)
    if weights:
        raise AlreadyCommittedError(
            f"{store.url}: {weights[0]} is there already, from an older or interrupted run; choose another "
            "folder, or overwrite",
            key=weights[0],
        )
    there = store.list_files()
    for name, content in companions.items():
        if name in there and store.read(name) != content:
            raise AlreadyCommittedError(
                f"{store.url}: another {name} is there already; choose another folder, or overwrite",
                key=name,
            )


def _remove_weights(store: Store) -> None:
    for name in _weights_in(store):
        store.delete(name)


def read_companions(store: Store) -> dict[str, bytes]:
    """Read the small files that stand beside a model's weights: configuration, tokenizer, chat template.

    Returns:
        Name → content, sorted; never weights or their index.

    Raises:
        NotFoundError: There are none.
    """
    names = [
        name
        for name in sorted(store.list_files())
        if any(fnmatchcase(name, pattern) for pattern in _COMPANIONS)
        and not name.endswith(".index.json")
    ]
    if not names:
        raise NotFoundError(
            f"{store.url}: no configuration or tokenizer files here ({', '.join(_COMPANIONS)}); name "
            "another folder"
        )
    return {name: store.read(name) for name in names}
