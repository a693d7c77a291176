"""Whatever lies in a checkpoint's files comes out as it was, or as an error that names the file."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from fsdp_ckpt import CorruptCheckpointError, StorageError
from fsdp_ckpt.commit.checkpoint import Checkpoint
from fsdp_ckpt.hf import consolidate
from fsdp_ckpt.hf.copying import CopyOptions
from fsdp_ckpt.hf.segments import SourceSegments
from fsdp_ckpt.hf.selection import Selection
from fsdp_ckpt.plan.dtypes import stored_form
from fsdp_ckpt.storage.local import LocalStore
from fsdp_ckpt.storage.store import ObjectWriter
from tests.golden.plain_reader import read_tensors
from tests.weights import DAMAGES, contents, save

GOLDEN = Path(__file__).parents[1] / "golden" / "v1"


@pytest.mark.parametrize("window_bytes", [1, 2**20])
def test_every_layout_of_the_golden_checkpoint(tmp_path: Path, window_bytes: int) -> None:
    """Mesh, strided, flat and listed chunks of three ranks, against a reader that shares no code."""
    found = read_tensors(next(GOLDEN.iterdir()))
    expected = {n: t for n, t in found.items() if stored_form(t[0], t[1]) == (t[0], t[1])}
    exclude = tuple(found.keys() - expected.keys())
    assert exclude
    consolidate(
        GOLDEN,
        tmp_path / "out",
        selection=Selection(what="all", exclude=exclude),
        copying=CopyOptions(window_bytes=window_bytes),
    )
    content = (tmp_path / "out" / "checkpoint.safetensors").read_bytes()
    data_offset = 8 + struct.unpack("<Q", content[:8])[0]
    with safe_open(tmp_path / "out" / "checkpoint.safetensors", "np") as file:
        assert set(file.keys()) == expected.keys()
    header = json.loads(content[8:data_offset])
    for name, (dtype, shape, data) in expected.items():
        start, stop = header[name]["data_offsets"]
        assert (header[name]["dtype"], tuple(header[name]["shape"])) == (dtype, shape)
        assert content[data_offset + start : data_offset + stop] == data


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_found_before_anything_is_published(tmp_path: Path, kind: str) -> None:
    """On object stores too, where a file has its final name when it is whole."""
    save(tmp_path / "run", nn.ParameterDict({f"t{i}": torch.ones(5000) for i in range(4)}))
    shard = next((tmp_path / "run").glob("*/*/rank-00000*.safetensors"))
    DAMAGES[kind](shard)
    url = f"memory://{tmp_path.name}/out"
    with pytest.raises(CorruptCheckpointError, match=shard.name):
        consolidate(tmp_path / "run", url, step=5, max_shard_bytes=20_000)
    with pytest.raises(CorruptCheckpointError, match=shard.name):
        consolidate(tmp_path / "run", tmp_path / "out", step=5, max_shard_bytes=20_000)
    assert not (tmp_path / "out").exists() or contents(tmp_path / "out") == {}


def test_a_file_that_vanishes_is_damage(tmp_path: Path) -> None:
    """What was there when the run began and is gone later is named as well."""
    folder = save(tmp_path / "run", nn.ParameterDict({"t": torch.ones(5000)}))
    shard = next(folder.glob("*/rank-*.safetensors"))
    with pytest.raises(CorruptCheckpointError, match=rf"{shard.name}.*missing"):
        consolidate(tmp_path / "run", tmp_path / "out", on_progress=lambda progress: shard.unlink())
    assert contents(tmp_path / "out") == {}


class Parts:
    """A writer that takes whole parts only, as a multipart object does."""

    ordered = False
    part_bytes = 12 * 1024

    def __init__(self, writer: ObjectWriter, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._write_at = writer.write_at
        self.flush, self.commit, self.abort = writer.flush, writer.commit, writer.abort

    def write_at(self, byte_offset: int, data: memoryview) -> None:
        assert byte_offset % self.part_bytes == 0
        assert len(data) % self.part_bytes == 0 or byte_offset + len(data) == self._num_bytes
        self._write_at(byte_offset, data)


class PartStore(LocalStore):
    def child(self, key: str) -> PartStore:
        return PartStore(super().child(key).url)

    def write(self, key: str, num_bytes: int) -> Any:
        return Parts(super().write(key, num_bytes), num_bytes)


def test_windows_are_whole_parts(tmp_path: Path) -> None:
    """A window is one part or several, whatever was asked for, and the file is the same."""
    save(tmp_path / "run", nn.ParameterDict({f"t{i}": torch.randn(5000) for i in range(7)}))
    consolidate(tmp_path / "run", tmp_path / "plain", max_shard_bytes=70_000)
    for window_bytes in (1, 20_000):
        out = tmp_path / str(window_bytes)
        consolidate(
            tmp_path / "run",
            PartStore(str(out)),  # type: ignore[arg-type]  # open_store takes stores too
            max_shard_bytes=70_000,
            copying=CopyOptions(window_bytes=window_bytes, num_threads=3),
        )
        assert contents(out) == contents(tmp_path / "plain")


def test_segments_are_shared_and_never_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More threads than buffers take turns; a failed read is everyone's, and the next try reads again."""
    folder = save(tmp_path, nn.ParameterDict({"t": torch.zeros(2**20)}))
    checkpoint = Checkpoint.open(LocalStore(str(folder)))
    segments = SourceSegments(checkpoint, buffer_bytes=1, num_files=1, num_threads=1)
    num_segments = checkpoint.header(0).layout.data_bytes // segments.segment_bytes
    assert num_segments > 3
    failures = [StorageError("once")]
    read_into = LocalStore.read_into

    def failing(store: LocalStore, key: str, byte_offset: int, buffer: memoryview) -> None:
        if failures:
            raise failures.pop()
        read_into(store, key, byte_offset, buffer)

    monkeypatch.setattr(LocalStore, "read_into", failing)
    with pytest.raises(StorageError, match="once"), segments.using((0, 0)):
        pass
    found: list[bytes] = []

    def use() -> None:
        for segment in range(num_segments):
            with segments.using((0, segment)) as data:
                found.append(bytes(data[:4]))

    run_together(use, 6)
    assert found == [bytes(4)] * 6 * num_segments


def run_together(call: Callable[[], None], num_threads: int) -> None:
    threads = [threading.Thread(target=call) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(250)
        assert not thread.is_alive()
