"""A consolidation that is interrupted is never taken for a whole one, and goes on where it was."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
import torch
from torch import nn

from fsdp_ckpt import AlreadyCommittedError, MismatchError, StorageError
from fsdp_ckpt.hf import consolidate
from fsdp_ckpt.hf.copying import CopyOptions
from fsdp_ckpt.hf.report import Progress
from fsdp_ckpt.hf.selection import Selection
from fsdp_ckpt.plan.image import BLOCK_BYTES
from fsdp_ckpt.storage.local import LocalStore
from tests.local_files import mounted
from tests.weights import INDEX, contents, save

NUM_FILES = 6
FILE_BYTES = 64 * 1024
IN_TURN = CopyOptions(num_threads=1, window_bytes=16 * 1024)


class StoppedError(Exception):
    """Not of the package: what a signal handler might raise."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tensors = {f"t{i}": torch.randn(FILE_BYTES // 4) for i in range(NUM_FILES)}
    save(tmp_path / "run", nn.ParameterDict(tensors))
    return tmp_path / "run"


@pytest.fixture
def expected(root: Path, tmp_path: Path) -> dict[str, bytes]:
    consolidate(root, tmp_path / "expected", max_shard_bytes=FILE_BYTES)
    return contents(tmp_path / "expected")


def stop_after(num_files: float) -> Callable[[Progress], None]:
    """Return what interrupts a run when so many files' bytes are written."""

    def stop(progress: Progress) -> None:
        if progress.done_bytes >= num_files * FILE_BYTES:
            raise StoppedError

    return stop


def partial_files(out: Path) -> list[str]:
    """Return what the hidden folder holds; there is nothing else in ``out``."""
    (folder,) = out.iterdir()
    assert folder.name.startswith(".fsdp-ckpt-partial-")
    return sorted(path.name for path in folder.iterdir())


def interrupt(root: Path, out: Path | str) -> None:
    """Leave a run with two whole files."""
    with pytest.raises(StoppedError):
        consolidate(
            root,
            out,
            max_shard_bytes=FILE_BYTES,
            copying=IN_TURN,
            on_progress=stop_after(2.6),
        )


def test_a_full_disk_is_an_error_and_resume_goes_on(
    root: Path, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    """What is whole stays, what is torn goes, and the rest comes when there is room."""
    out = tmp_path / "out"
    out.mkdir()
    room = NUM_FILES // 2 * FILE_BYTES + FILE_BYTES // 2
    with mounted("tmpfs", out, "-o", f"size={room}"):
        with pytest.raises(StorageError, match=r"No space left.*2 of 6 files are whole and kept"):
            consolidate(root, out, max_shard_bytes=FILE_BYTES, copying=IN_TURN)
        kept = partial_files(out)
        assert kept == [f"model-0000{i}-of-00006.safetensors" for i in (1, 2)]
        subprocess.run(["mount", "-o", "remount,size=16m", str(out)], check=True)
        reported: list[int] = []
        consolidate(
            root,
            out,
            max_shard_bytes=FILE_BYTES,
            resume=True,
            on_progress=lambda progress: reported.append(progress.done_bytes),
        )
        assert reported[0] > 2 * FILE_BYTES
        assert contents(out) == expected


def test_an_interrupted_run_is_resumed_or_refused(
    root: Path, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    """What is whole is not written again; without being told, nothing of it is touched."""
    out = tmp_path / "out"
    interrupt(root, out)
    assert partial_files(out) == [f"model-0000{i}-of-00006.safetensors" for i in (1, 2)]
    whole = {path.name: path.stat().st_ino for path in next(out.iterdir()).iterdir()}
    with pytest.raises(AlreadyCommittedError, match="resume"):
        consolidate(root, out, max_shard_bytes=FILE_BYTES)
    consolidate(root, out, max_shard_bytes=FILE_BYTES, resume=True)
    assert contents(out) == expected
    assert {name: (out / name).stat().st_ino for name in whole} == whole


@pytest.mark.parametrize("selection", [Selection(prefix="x."), Selection(dtype="BF16")])
def test_only_the_same_run_is_resumed(root: Path, tmp_path: Path, selection: Selection) -> None:
    """Files of other options are not taken over."""
    out, fresh = tmp_path / "out", tmp_path / "fresh"
    interrupt(root, out)
    consolidate(root, out, max_shard_bytes=FILE_BYTES, selection=selection, resume=True)
    consolidate(root, fresh, max_shard_bytes=FILE_BYTES, selection=selection)
    assert contents(out) == contents(fresh)


def test_another_checkpoint_is_not_resumed(root: Path, tmp_path: Path) -> None:
    """The same names and shapes are not the same model."""
    out = tmp_path / "out"
    interrupt(root, out)
    torch.manual_seed(1)
    other = {f"t{i}": torch.randn(FILE_BYTES // 4) for i in range(NUM_FILES)}
    save(root, nn.ParameterDict(other), 6)
    consolidate(root, out, max_shard_bytes=FILE_BYTES, resume=True)
    consolidate(root, tmp_path / "fresh", max_shard_bytes=FILE_BYTES)
    assert contents(out) == contents(tmp_path / "fresh")


@pytest.mark.parametrize("kept", [True, False])
def test_an_object_store_is_resumed(
    root: Path, tmp_path: Path, expected: dict[str, bytes], kept: bool
) -> None:
    """Whole objects stay under their names, without an index; another run begins anew."""
    url = f"memory://{tmp_path.name}/out"
    fs, folder = fsspec.core.url_to_fs(url)
    interrupt(root, url)
    there = {path.rpartition("/")[2] for path in fs.find(folder)}
    assert INDEX not in there
    assert len([name for name in there if name.endswith(".safetensors")]) == 2
    first = f"{folder}/model-00001-of-00006.safetensors"
    if not kept:
        fs.pipe_file(first, b"torn")
    consolidate(root, url, max_shard_bytes=FILE_BYTES, resume=True)
    assert {path.rpartition("/")[2]: fs.cat_file(path) for path in fs.find(folder)} == expected


def test_overflow_publishes_nothing_anywhere(tmp_path: Path) -> None:
    """A single object would be published by being complete: the count comes before."""
    save(tmp_path / "run", nn.ParameterDict({"huge": torch.full((3,), 1e6)}))
    url = f"memory://{tmp_path.name}/overflow"
    fs, folder = fsspec.core.url_to_fs(url)
    with pytest.raises(MismatchError, match="3 numbers of 1 tensors"):
        consolidate(tmp_path / "run", url, selection=Selection(dtype="F16"))
    assert fs.find(folder) == []


def test_what_came_into_the_folder_meanwhile_stays(root: Path, tmp_path: Path) -> None:
    """The folder is looked at again before anything in it is replaced."""
    out = tmp_path / "out"

    def intrude(progress: Progress) -> None:
        out.mkdir(exist_ok=True)
        (out / "model.safetensors").write_text("another run's")

    with pytest.raises(AlreadyCommittedError, match="not empty"):
        consolidate(root, out, on_progress=intrude)
    assert contents(out) == {"model.safetensors": b"another run's"}


KILLED_RUN = """
import os, signal, sys
from fsdp_ckpt.hf import consolidate
from fsdp_ckpt.hf.copying import CopyOptions

root, out, file_bytes, window_bytes, num_bytes = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])

def die(progress):
    if progress.done_bytes >= num_bytes:
        os.kill(os.getpid(), signal.SIGKILL)

copying = CopyOptions(num_threads=1, window_bytes=window_bytes)
consolidate(root, out, max_shard_bytes=file_bytes, copying=copying, on_progress=die)
"""


def test_a_killed_run_is_resumed(root: Path, tmp_path: Path, expected: dict[str, bytes]) -> None:
    """Killed in the middle of a file: that file is torn, has not got its name, and is written anew."""
    out = tmp_path / "out"
    numbers = [FILE_BYTES, IN_TURN.window_bytes, int(2.6 * FILE_BYTES)]
    command = [sys.executable, "-c", KILLED_RUN, str(root), str(out), *map(str, numbers)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=250)
    assert ended.returncode == -9, ended.stderr
    names = [f"model-0000{i}-of-00006.safetensors" for i in (1, 2, 3)]
    assert partial_files(out) == [*names[:2], f"{names[2]}.part"]
    consolidate(root, out, max_shard_bytes=FILE_BYTES, resume=True)
    assert contents(out) == expected


@pytest.mark.parametrize("num_threads", [1, 3])
def test_every_byte_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    """A part of a file that several windows need is read for the first and kept for the others."""
    save(tmp_path / "run", nn.ParameterDict({"t": torch.zeros(12 * BLOCK_BYTES // 4)}))
    counts: Counter[int] = Counter()
    read_into = LocalStore.read_into

    def counted(store: LocalStore, key: str, byte_offset: int, buffer: memoryview) -> None:
        counts.update(range(byte_offset, byte_offset + len(buffer), 4096))
        read_into(store, key, byte_offset, buffer)

    monkeypatch.setattr(LocalStore, "read_into", counted)
    copying = CopyOptions(
        num_threads=num_threads, window_bytes=48 * 1024, buffer_bytes=20 * BLOCK_BYTES
    )
    consolidate(tmp_path / "run", tmp_path / "out", copying=copying)
    assert set(counts.values()) == {1}
    assert len(counts) > 12 * BLOCK_BYTES // 4096


def test_the_source_does_not_change(root: Path, tmp_path: Path) -> None:
    """Neither content nor times of any file below the root."""

    def state() -> dict[str, tuple[bytes, int]]:
        files = [path for path in root.rglob("*") if path.is_file()]
        return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}

    before = state()
    consolidate(root, tmp_path / "out", max_shard_bytes=FILE_BYTES)
    assert state() == before
