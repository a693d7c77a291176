"""Hostile folders: whatever opens, verifies, lists or converts a checkpoint reads nothing outside of it."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import sys
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from fsdp_ckpt.cli import main
from fsdp_ckpt.commit.catalog import CheckpointInfo, SkippedCheckpoint, find_checkpoints
from fsdp_ckpt.commit.checkpoint import Checkpoint
from fsdp_ckpt.commit.verify import find_damage
from fsdp_ckpt.errors import CheckpointError, CorruptCheckpointError
from fsdp_ckpt.storage.local import LocalStore
from scripts import fuzz
from scripts.fuzz_targets import (
    FOLDER,
    golden_parts,
    put_together,
    read_checkpoint,
    seal_manifest,
    write_json,
)

PARTS = golden_parts()
MANIFEST = PARTS["manifest"]
FIRST = MANIFEST["files"][0][0]
ERRORS_OF_PARTS = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)

_watches: list[list[str]] = []


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if _watches and event in ("open", "os.scandir", "os.listdir"):
        _watches[-1].append(str(arguments[0]))


sys.addaudithook(_note)  # stays as long as the process, and is idle outside of a watch


@contextmanager
def nothing_opened_outside(root: Path) -> Iterator[None]:
    """Fail where this process opens or lists anything that does not really lie below ``root``."""
    _watches.append([])
    try:
        yield
    finally:
        opened = _watches.pop()
    top = os.path.realpath(root)
    paths = [path for path in opened if path.startswith("/") and not path.startswith("/proc/self/")]
    assert paths, "nothing was opened at all"
    outside = [p for p in paths if os.path.commonpath((top, os.path.realpath(p))) != top]
    assert outside == []


def write(folder: Path, parts: Any) -> None:
    """Write a checkpoint of changed parts, with digests that match."""
    for key, content in put_together(copy.deepcopy(parts)).items():
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(content)


def write_manifest(folder: Path, **fields: Any) -> None:
    """Write the golden manifest with other fields."""
    (folder / "manifest.json").write_bytes(seal_manifest(write_json(MANIFEST | fields)))


def renamed(name: str) -> list[Any]:
    """Return the rows of files, the first of which has another name."""
    return [[name, *MANIFEST["files"][0][1:]], *MANIFEST["files"][1:]]


def use(root: Path) -> list[CheckpointError]:
    """Find, verify and read the checkpoint; return the errors, which are all of our tree."""
    store = LocalStore(str(root))
    errors: list[CheckpointError] = []
    try:
        list(find_checkpoints(store))
        checkpoint = Checkpoint.open(store.child(FOLDER))
        errors.extend(find_damage(checkpoint))
        read_checkpoint(checkpoint)
        checkpoint.check_files()
    except CheckpointError as e:
        errors.append(e)
    return errors


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run's root that holds a sound checkpoint, beside a file that no one may read."""
    root = tmp_path / "run"
    write(root / FOLDER, PARTS)
    shutil.copytree(root / FOLDER, tmp_path / "secret")
    assert use(root) == []  # and everything that reads is imported
    return root


def test_the_watch_sees_what_is_read_elsewhere(root: Path) -> None:
    """A read outside of the root would be noticed."""
    with pytest.raises(AssertionError, match="secret"), nothing_opened_outside(root):
        LocalStore(str(root.parent)).read("secret/manifest.json")
    with nothing_opened_outside(root):
        assert use(root) == []


@pytest.mark.parametrize(
    "name",
    [
        f"../../secret/{FIRST}",
        "../secret.safetensors",
        "../rank.safetensors",
        "/etc/passwd",
        "//etc/passwd.safetensors",
        f"a/../../../secret/{FIRST}",
        "..\\secret\\rank.safetensors",
        "file:///etc/passwd.safetensors",
        "s3://other-bucket/rank.safetensors",
        "s3:/rank.safetensors",
        "~root/rank.safetensors",
        "%2e%2e/rank.safetensors",
        "a/rank.safetensors\0.txt",
        "a/" + "b" * 300 + ".safetensors",
        "a" * 300 + "/b.safetensors",
        "a/*.safetensors",
    ],
)
def test_names_that_lead_out_are_refused(root: Path, name: str) -> None:
    """File names of a manifest are names in its own folder, or it is refused before any is opened."""
    write_manifest(root / FOLDER, files=renamed(name))
    with nothing_opened_outside(root):
        (error,) = use(root)
    assert isinstance(error, CorruptCheckpointError)
    assert "leaves the checkpoint" in str(error)


@pytest.mark.parametrize("place", ["shard", "attempt", "manifest", "folder"])
def test_links_that_lead_out_are_not_followed(root: Path, place: str) -> None:
    """A shard, an attempt, a manifest or a whole checkpoint that is a link to somewhere else is not read."""
    key = {
        "shard": FIRST,
        "attempt": FIRST.split("/")[0],
        "manifest": "manifest.json",
        "folder": "",
    }
    path = root / FOLDER / key[place]
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.symlink_to(root.parent / "secret" / key[place])
    with nothing_opened_outside(root):
        assert use(root)
        assert main(["ls", str(root)]) in (0, 1)  # sizes only
        assert main(["verify", str(root)]) == 1


@pytest.mark.parametrize("key", ["manifest.json", FIRST])
def test_a_pipe_is_not_waited_for(root: Path, key: str) -> None:
    """A named pipe in the place of a file is damage, not a reason to wait for ever."""
    path = root / FOLDER / key
    path.unlink()
    os.mkfifo(path)
    assert use(root)


def test_the_same_file_for_two_ranks_is_refused(root: Path) -> None:
    """Each rank has a file."""
    write_manifest(root / FOLDER, files=[*MANIFEST["files"][:2], MANIFEST["files"][0]])
    (error,) = use(root)
    assert "same file" in str(error)


def test_a_file_of_another_attempt_is_refused(root: Path) -> None:
    """A shard that is whole, with a digest that the manifest knows, but of another save."""
    other = "20270101T000000-0123456789ab"
    parts = json.loads(json.dumps(PARTS).replace(FIRST, f"{other}/rank-00000-of-00003.safetensors"))
    header = parts["headers"][f"{other}/rank-00000-of-00003.safetensors"]
    header["__metadata__"]["fsdp_ckpt"]["attempt"] = other
    write(root / FOLDER, parts)
    assert all("another save" in str(error) for error in use(root))
    assert use(root)


def test_tensors_that_no_file_has_room_for_are_refused(root: Path) -> None:
    """Who makes room for what a manifest names makes no more of it than its files can fill."""
    rows = [[path, dtype, [2**40], *rest] for path, dtype, _, *rest in MANIFEST["tensors"][:1]]
    layouts = [{"mesh": 0, "placements": ["R"] * len(MANIFEST["meshes"][0]["shape"])}]
    rows = [[*row[:3], 0, 0] for row in rows]
    write_manifest(root / FOLDER, tensors=rows, layouts=layouts, inline={})
    (error,) = use(root)
    assert "in files of" in str(error)


def test_sizes_that_files_do_not_have_cost_nothing(root: Path) -> None:
    """Headers and data of claimed sizes are neither read nor reserved."""
    for data_offset, num_bytes in ((99_999_744, 2**40), (2**40, 2**61), (4096, 2**61)):
        files = [[name, num_bytes, data_offset, d] for name, _, _, d in MANIFEST["files"][:1]]
        write_manifest(root / FOLDER, files=files + MANIFEST["files"][1:])
        tracemalloc.start()
        errors = use(root)
        held = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert errors
        assert held < 20 * 10**6


def test_a_manifest_without_end_is_not_read(root: Path) -> None:
    """A file of eight GiB that takes no room on disk takes none in memory."""
    with open(root / FOLDER / "manifest.json", "r+b") as file:
        file.truncate(2**33)
    (error,) = use(root)
    assert "at most" in str(error)


def test_what_is_hostile_hides_nothing(root: Path) -> None:
    """Discovery passes over a hostile checkpoint, with the reason, and finds the older ones."""
    shutil.copytree(root / FOLDER, root / "step-000000043")
    with open(root / "step-000000043" / "manifest.json", "r+b") as file:
        file.truncate(2**33)
    for step, files in (
        (44, renamed("../x.safetensors")),
        (45, renamed("a" * 300 + "/b.safetensors")),
    ):
        folder = root / f"step-{step:09d}"
        folder.mkdir()
        write_manifest(folder, step=step, files=files)
    *skipped, found = find_checkpoints(LocalStore(str(root)))
    assert isinstance(found, CheckpointInfo)
    assert found.step == 42
    assert [s.step for s in skipped if isinstance(s, SkippedCheckpoint)] == [45, 44, 43]


def test_damage_of_many_files_is_told_quickly(root: Path) -> None:
    """What each of thousands of lost files held is not looked up in each of thousands of tensors."""
    num_ranks, num_rows = 2000, 2000
    files = [[f"a/{rank}.safetensors", 8192, 4096, "0" * 16] for rank in range(num_ranks)]
    rows = [[["w", i], "U8", [num_ranks], 0, 0] for i in range(num_rows)]
    fields = {"meshes": [{"shape": [num_ranks]}], "layouts": [{"mesh": 0, "placements": ["S0"]}]}
    document = {"world_size": num_ranks, "files": files, "tensors": rows, "inline": {}, **fields}
    write_manifest(root / FOLDER, **document)
    checkpoint = Checkpoint.open(LocalStore(str(root)).child(FOLDER))
    start = time.process_time()
    found = list(find_damage(checkpoint))
    assert time.process_time() - start < 20
    assert len(found) == num_ranks
    assert "it holds w.0" in str(found[0])


@pytest.mark.parametrize("seed", range(25))
def test_commands_answer_hostile_checkpoints(
    root: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """``ls``, ``show``, ``verify`` and ``consolidate`` end with 0 or 1, and open nothing else."""
    rng = random.Random(seed)
    parts = copy.deepcopy(PARTS)
    fuzz.change([parts["manifest"], *parts["headers"].values()], rng)
    with suppress(*ERRORS_OF_PARTS):
        write(root / FOLDER, parts)
    out = str(root / "out")
    commands = (["ls"], ["show"], ["verify"], ["show", "--json"], ["ls", "--json"])
    with nothing_opened_outside(root):
        for command in commands:
            assert main([*command, str(root)]) in (0, 1)
        assert main(["consolidate", str(root), out, "--overwrite"]) in (0, 1)
    assert "Traceback" not in "".join(capsys.readouterr())
