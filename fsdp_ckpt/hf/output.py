"""The output folder, and how a run's files come to stand in it.

    open_output --> begin --> write ... write --> publish      all are there, the index last
                                             \\--> keep         what is whole waits for a run that resumes
                                             \\--> discard

Invariant: at no moment can what stands in the folder be taken for a whole model that it is not. A file has
its final name only when it is whole; readers find shards through the index, which goes first when an older
run is removed and comes last when a new one is published.

    local     files are written in a hidden folder below, and renamed once all of them are whole: until then
              an older run stands untouched
    objects   a store has no rename, but an object appears only when it is complete: an older run is removed
              before the first new file is written, and a marker says whose files these are

The hidden folder and the marker bear the run's fingerprint, so that only the same run resumes. One run at a
time: a second one into the same folder makes the first fail.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Protocol

from fsdp_ckpt.errors import CheckpointError, NotFoundError
from fsdp_ckpt.hf.occupied import (
    PARTIAL,
    index_name,
    leftovers_in,
    refuse_occupied,
    remove_weights,
)
from fsdp_ckpt.storage.durable import fsync_dir
from fsdp_ckpt.storage.local import LocalStore
from fsdp_ckpt.storage.local_writer import mapped_os_errors
from fsdp_ckpt.storage.store import ObjectWriter, Store

__all__ = ["OutputFolder", "open_output", "read_companions"]

_TORN = ".part"
_COMPANIONS = ("*.json", "*.txt", "*.model", "*.jinja")


class OutputFolder(Protocol):
    """Takes a run's files and ends with one of ``publish``, ``keep`` and ``discard``."""

    def begin(self, sizes: Mapping[str, int]) -> frozenset[str]:
        """Make room for the run's files.

        Args:
            sizes: Name → bytes of all files of the run.

        Returns:
            Those that a run that is resumed has left whole.
        """
        ...

    @property
    def token(self) -> str:
        """What other ranks ``join``."""
        ...

    def join(self, token: str) -> None:
        """Write into what another rank has begun; this one neither publishes nor removes."""
        ...

    def write(self, name: str, num_bytes: int) -> ObjectWriter:
        """Start one of the files; it is whole when the writer has committed it."""
        ...

    def publish(self, index: bytes | None) -> None:
        """Make the run's files, all whole by now, the folder's content; ``index`` comes last."""
        ...

    def keep(self) -> Sequence[str]:
        """End the run so that it can be resumed; return the names of what is whole."""
        ...

    def discard(self) -> None:
        """Remove what this run has written; never raises an error of a store."""
        ...


def open_output(
    store: Store,
    companions: Mapping[str, bytes],
    *,
    overwrite: bool,
    resumes: bool = False,
    fingerprint: str = "new",
    stem: str = "model",
) -> OutputFolder:
    """Look at the output folder; changes nothing.

    Args:
        store: The folder.
        companions: Name → content of the small files that stand beside the weights.
        overwrite: Replace an older run.
        resumes: Go on with an interrupted run of the same fingerprint, where there is one.
        fingerprint: Of all that decides on the files' bytes.
        stem: With which the names of the run's files begin.

    Raises:
        AlreadyCommittedError: It is not empty, and ``overwrite`` is false.
        StorageError: It cannot be read.
    """
    resumed = resumes and any(f"-{fingerprint}-" in name for name in leftovers_in(store))
    # What a resumed run finds may be its own, from a publishing that did not end.
    refuses = not overwrite and not resumed
    if refuses:
        refuse_occupied(store, allows_leftovers=resumes)
    mark = f"{PARTIAL}{fingerprint}-"
    if isinstance(store, LocalStore):
        return _LocalFolder(store, companions, mark, stem, resumed=resumed, refuses=refuses)
    return _ObjectFolder(store, companions, mark, stem, resumed=resumed)


class _LocalFolder:
    def __init__(
        self,
        store: LocalStore,
        companions: Mapping[str, bytes],
        mark: str,
        stem: str,
        *,
        resumed: bool,
        refuses: bool,
    ) -> None:
        self._store = store
        self._refuses = refuses
        self._companions = companions
        self._mark = mark
        self._stem = stem
        self._resumed = resumed
        self._sizes: Mapping[str, int] = {}
        self.join(f"{mark}{uuid.uuid4().hex}")

    def join(self, token: str) -> None:
        self.token = token
        self._partial = self._store.child(token)

    def begin(self, sizes: Mapping[str, int]) -> frozenset[str]:
        self._sizes = sizes
        for name in leftovers_in(self._store):
            path = os.path.join(self._store.url, name)
            if self._resumed and name.startswith(self._mark) and not self._partial.list_files():
                # Renamed, so that a run that still writes there fails instead of sharing it.
                with mapped_os_errors(path):
                    os.rename(path, self._partial.url)
            else:
                shutil.rmtree(path, ignore_errors=True)
        there = self._partial.list_files()
        for name in there:
            if sizes.get(name) != there[name]:
                self._partial.delete(name)
        return frozenset(_whole_in(self._partial, self._sizes))

    def write(self, name: str, num_bytes: int) -> ObjectWriter:
        path = os.path.join(self._partial.url, name)
        return _NamedWhenWhole(self._partial.write(f"{name}{_TORN}", num_bytes), path)

    def publish(self, index: bytes | None) -> None:
        if self._refuses:
            refuse_occupied(self._store, allows_leftovers=True)  # since we looked, too
        for name, content in self._companions.items():
            self._partial.create(name, content)
        names = list(self._sizes)
        if index is not None:
            self._partial.create(index_name(self._stem), index)
        remove_weights(self._store, self._stem)
        with mapped_os_errors(self._store.url):
            # The older index is gone for good before a file that it names changes.
            fsync_dir(self._store.url)
            self._rename([*self._companions, *names])
            if index is not None:
                self._rename([index_name(self._stem)])
            os.rmdir(self._partial.url)

    def _rename(self, names: Sequence[str]) -> None:
        """Give files their final names; they have them durably when this returns."""
        for name in names:
            os.rename(os.path.join(self._partial.url, name), os.path.join(self._store.url, name))
        fsync_dir(self._store.url)

    def keep(self) -> Sequence[str]:
        whole = _whole_in(self._partial, self._sizes)
        if not whole:
            self.discard()
        return whole

    def discard(self) -> None:
        shutil.rmtree(self._partial.url, ignore_errors=True)


class _NamedWhenWhole:
    """A local file that gets its name when it is durable: an interrupted one is never taken for whole."""

    def __init__(self, writer: ObjectWriter, path: str) -> None:
        self._writer = writer
        self._path = path
        self.ordered = writer.ordered
        self.part_bytes = writer.part_bytes
        self.write_at = writer.write_at
        self.flush = writer.flush
        self.abort = writer.abort

    def commit(self) -> None:
        self._writer.commit()
        with mapped_os_errors(self._path):
            os.rename(f"{self._path}{_TORN}", self._path)


class _ObjectFolder:
    def __init__(
        self, store: Store, companions: Mapping[str, bytes], mark: str, stem: str, *, resumed: bool
    ) -> None:
        self._store = store
        self._companions = companions
        self._stem = stem
        self._resumed = resumed
        self._sizes: Mapping[str, int] = {}
        self.token = f"{mark}objects"

    def join(self, token: str) -> None:
        self.token = token

    def begin(self, sizes: Mapping[str, int]) -> frozenset[str]:
        self._sizes = sizes
        whole = _whole_in(self._store, self._sizes) if self._resumed else []
        remove_weights(self._store, self._stem, but=whole)
        for name in leftovers_in(self._store):
            if name != self.token or not self._resumed:
                self._store.delete(name)
        if not self._resumed:
            self._store.create(self.token, b"")
        self._put_companions()
        return frozenset(whole)

    def _put_companions(self) -> None:
        there = self._store.list_files()
        for name, content in self._companions.items():
            if name in there:
                if self._store.read(name) == content:
                    continue
                self._store.delete(name)
            self._store.create(name, content)

    def write(self, name: str, num_bytes: int) -> ObjectWriter:
        return self._store.write(name, num_bytes)

    def publish(self, index: bytes | None) -> None:
        if index is not None:
            self._store.create(index_name(self._stem), index)
        self._store.delete(self.token)

    def keep(self) -> Sequence[str]:
        whole = _whole_in(self._store, self._sizes)
        if not whole:
            self.discard()
        return whole

    def discard(self) -> None:
        # The index first: it may be there although the answer was lost.
        with suppress(CheckpointError):
            remove_weights(self._store, self._stem)
        for name in (*self._companions, self.token):
            with suppress(CheckpointError):
                self._store.delete(name)


def _whole_in(store: Store, sizes: Mapping[str, int]) -> list[str]:
    """Return which of a run's files stand there in full."""
    there = store.list_files()
    return [name for name, num_bytes in sizes.items() if there.get(name) == num_bytes]


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
