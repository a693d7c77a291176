"""DeepSpeed's files that are missing, short, of another checkpoint or hostile: a line says which and why."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp_ckpt import CheckpointError
from fsdp_ckpt.deepspeed import import_deepspeed
from fsdp_ckpt.deepspeed.unpickler import read_pickle
from fsdp_ckpt.errors import (
    CorruptCheckpointError,
    MismatchError,
    NotFoundError,
    UnencodableStateError,
)
from tests.deepspeed_files import KEPT, STEPS

TAG = f"global_step{STEPS}"
OPTIMIZER = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
MODEL = "zero_pp_rank_{}_mp_rank_00_model_states.pt"


def cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:num_bytes])


def repack(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Write a file anew, its pickle changed."""
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, change(data) if name.endswith("data.pkl") else data)


def declare_partitions(folder: Path) -> None:
    """Let every rank's file say that there were three."""
    for rank in range(2):
        repack(
            folder / OPTIMIZER.format(rank),
            lambda data: data.replace(b"partition_countq\x0fK\x02", b"partition_countq\x0fK\x03"),
        )


DAMAGES: dict[str, tuple[str, Callable[[Path], Any], type[CheckpointError], str]] = {
    "short": ("stage3", lambda f: cut(f / OPTIMIZER.format(1), 3000), CorruptCheckpointError,
        r"rank_1_mp_rank_00_optim_states\.pt: not a whole file of torch\.save"),
    "empty": ("stage2", lambda f: cut(f / "mp_rank_00_model_states.pt", 0), CorruptCheckpointError,
        "model_states.pt: not a whole file"),
    "last rank missing": ("stage3", lambda f: (f / OPTIMIZER.format(1)).unlink(), CorruptCheckpointError,
        "1 optim_states files, 2 partitions declared"),
    "first rank missing": ("stage2", lambda f: (f / OPTIMIZER.format(0)).unlink(), CorruptCheckpointError,
        "optim_states file of rank 0 is missing"),
    "model missing": ("stage3", lambda f: (f / MODEL.format(1)).unlink(), CorruptCheckpointError,
        "1 model_states files, 2 expected for stage 3"),
    "declared otherwise": ("stage3", declare_partitions, CorruptCheckpointError,
        "2 optim_states files, 3 partitions declared"),
    "another rank's": ("stage2", lambda f: shutil.copy(f / OPTIMIZER.format(0), f / OPTIMIZER.format(1)),
        CorruptCheckpointError, r"says it holds .* expected of rank 1"),
    "another stage's": ("stage3", lambda f: shutil.copy(
        KEPT / "stage2" / TAG / OPTIMIZER.format(1), f / OPTIMIZER.format(1)), CorruptCheckpointError,
        "rank_1_mp_rank_00_optim_states.pt: stage 2, 3 expected"),
    "two runs": ("stage3", lambda f: shutil.copy(
        f / OPTIMIZER.format(1), f / OPTIMIZER.format(1).removeprefix("bf16_")), CorruptCheckpointError,
        "are both rank 1's"),
    "tensor parallel": ("stage2", lambda f: (f / "mp_rank_01_model_states.pt").touch(), MismatchError,
        "only data parallel ZeRO"),
    "not a checkpoint": ("stage2", lambda f: repack(
        f / "mp_rank_00_model_states.pt", lambda data: pickle.dumps({"a": 1}, 2)), CorruptCheckpointError,
        "not a file of a ZeRO checkpoint"),
    "latest": ("stage2", lambda f: (f.parent / "latest").write_text("global_step9"), NotFoundError,
        r"global_step9: which .*latest names, no files .* folders here: global_step2"),
    "latest leads out": ("stage2", lambda f: (f.parent / "latest").write_text("../x"), CorruptCheckpointError,
        "is not a tag of this folder"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_one_line_and_writes_nothing(tmp_path: Path, damage: str) -> None:
    """The error names the file and what was expected; no checkpoint appears."""
    run, change, error, words = DAMAGES[damage]
    shutil.copytree(KEPT / run, tmp_path / "ds")
    change(tmp_path / "ds" / TAG)
    with pytest.raises(error, match=words) as caught:
        import_deepspeed(tmp_path / "ds", tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "run").rglob("*")) == []


def test_every_cut_of_a_file_is_noticed(tmp_path: Path) -> None:
    """However short it is, it is refused before anything is written."""
    shutil.copytree(KEPT / "stage3", tmp_path / "ds")
    path = tmp_path / "ds" / TAG / OPTIMIZER.format(0)
    whole = path.read_bytes()
    for num_bytes in range(0, len(whole), 97):
        path.write_bytes(whole[:num_bytes])
        with pytest.raises(CorruptCheckpointError):
            import_deepspeed(tmp_path / "ds", tmp_path / "run")
    assert not (tmp_path / "run").exists()


class Hostile:
    """Runs a command where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_hostile_file_is_refused_by_name(tmp_path: Path, protocol: int) -> None:
    """What it would run is named, and does not run."""
    shutil.copytree(KEPT / "stage3", tmp_path / "ds")
    hostile = pickle.dumps({"module": Hostile(tmp_path / "ran")}, protocol)
    repack(tmp_path / "ds" / TAG / MODEL.format(0), lambda data: hostile)
    with pytest.raises(UnencodableStateError, match=r"names (posix|nt)\.system") as caught:
        import_deepspeed(tmp_path / "ds", tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


def parse(data: bytes) -> Any:
    return read_pickle(data, "file.pt", lambda key, num_bytes: 0)


LAUGHS = b"\x80\x02]q\x00" + b"".join(
    b"](h" + bytes([i]) + b"h" + bytes([i]) + b"eq" + bytes([i + 1]) for i in range(60)
) + b"."  # fmt: skip
HOSTILE = {
    "long": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "text": b"\x80\x04\x8d" + struct.pack("<Q", 2**40) + b".",
    "laughs": LAUGHS,
    "itself": b"\x80\x02]q\x00h\x00a.",
    "deep": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "calls a value": b"\x80\x02]]R.",
    "class attributes": b"\x80\x02cdeepspeed.runtime.fp16.loss_scaler\nLossScaler\n}U\x01aK\x01sb.",
    "old instances": b"(icollections\nOrderedDict\n.",
    "extension": b"\x80\x02\x82\x01.",
    "unhashable": b"\x80\x02}]K\x01s.",
    "no end": b"\x80\x02",
    "empty": b"",
    "storage": b"\x80\x02K\x01Q.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_are_refused_in_bounded_memory(name: str) -> None:
    """Claimed sizes are not allocated, nothing is called, nothing of ours is changed."""
    with pytest.raises(CorruptCheckpointError, match=r"file\.pt: ") as caught:
        parse(HOSTILE[name])
    assert "\n" not in str(caught.value)


def test_an_index_of_the_memo_takes_no_memory() -> None:
    """However high it is: the C interpreter would allocate a table up to it."""
    assert parse(b"\x80\x02]r\xff\xff\xff\x7f.") == []


def test_only_what_stands_in_the_table_is_found() -> None:
    """Names of builtins, of torch's loaders and of this package are refused alike."""
    for line in (
        b"builtins\neval", b"builtins\nbytearray", b"torch\nload", b"torch.storage\n_load_from_bytes",
        b"fsdp_ckpt.deepspeed.unpickler\nread_pickle", b"argparse\nNamespace", b"numpy\nndarray",
    ):  # fmt: skip
        with pytest.raises(UnencodableStateError, match=line.replace(b"\n", b".").decode()):
            parse(b"\x80\x02c" + line + b"\n.")


def test_every_opcode_of_real_files_is_known() -> None:
    """What is allowed is what DeepSpeed writes, and more of its kind."""
    for path in KEPT.rglob("*.pt"):
        with zipfile.ZipFile(path) as archive:
            name = next(n for n in archive.namelist() if n.endswith("data.pkl"))
            data = archive.read(name)
        assert [op.name for op, *_ in pickletools.genops(io.BytesIO(data))][-1] == "STOP"
        assert isinstance(parse(data), dict)
