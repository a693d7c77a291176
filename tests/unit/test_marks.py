"""Marks say something about one checkpoint, for good, and change nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_ckpt.commit.catalog import CheckpointInfo, find_checkpoints
from fsdp_ckpt.commit.inventory import take_inventory
from fsdp_ckpt.commit.marks import Marks, add_mark, mark_key, mark_of, read_marks, remove_mark
from fsdp_ckpt.commit.records import MAX_RECORD_BYTES, read_record, record_to_bytes
from fsdp_ckpt.errors import CorruptCheckpointError
from fsdp_ckpt.storage.local import LocalStore
from fsdp_ckpt.storage.store import Store
from tests.roots import attempt_at, put_checkpoint


@pytest.fixture
def root(tmp_path: Path) -> Store:
    """A root with one checkpoint, of step 10."""
    store = LocalStore(str(tmp_path / "run"))
    put_checkpoint(store, 10, attempt=attempt_at(0), epoch=3)
    return store


def folder(root: Store) -> Store:
    return root.child("step-000000010")


def test_a_mark_is_made_once_and_can_be_taken_away(root: Store) -> None:
    """The first one stays, with its note; one that is not there is taken away without an error."""
    assert add_mark(root, 10, attempt_at(0), "good", note="went\nwell")
    assert not add_mark(root, 10, attempt_at(0), "good", note="again")
    record = read_record(folder(root), mark_key("good", attempt_at(0)), "good")
    assert (record["step"], record["attempt"], record["note"]) == (10, attempt_at(0), "went well")
    assert read_marks(folder(root), attempt_at(0)).kinds == {"good"}
    for _ in range(2):
        remove_mark(root, 10, attempt_at(0), "good")
    assert read_marks(folder(root), attempt_at(0)) == Marks()


def test_a_mark_does_not_pass_to_another_attempt(root: Store) -> None:
    """Whoever saves the step again starts without marks."""
    add_mark(root, 10, attempt_at(0), "pinned")
    assert read_marks(folder(root), attempt_at(1)) == Marks()


def test_a_score_is_read_where_it_is_wanted(root: Store) -> None:
    """Names alone tell the kinds; metrics are finite numbers."""
    add_mark(root, 10, attempt_at(0), "scored", metrics={"loss": 2, "accuracy": 0.5})
    assert read_marks(folder(root), attempt_at(0)).metrics == {}
    marks = read_marks(folder(root), attempt_at(0), with_metrics=True)
    assert (marks.kinds, marks.metrics) == ({"scored"}, {"loss": 2.0, "accuracy": 0.5})
    with pytest.raises(ValueError, match="JSON"):
        add_mark(root, 10, attempt_at(1), "scored", metrics={"loss": float("nan")})


def test_discovery_sees_no_marks(root: Store) -> None:
    """A marked checkpoint is found as it was; its epoch is known from its own state."""
    before = list(find_checkpoints(root))
    for kind in ("good", "pinned", "scored", "corrupt", "pruned"):
        add_mark(root, 10, attempt_at(0), kind)
    assert list(find_checkpoints(root)) == before
    (info,) = before
    assert isinstance(info, CheckpointInfo)
    assert info.epoch == 3
    (held,) = take_inventory(root).checkpoints
    assert len(held.marks.kinds) == 5


@pytest.mark.parametrize(
    "name",
    [
        "manifest.json",
        "damaged-0123456789ab.json",
        "good-.json",
        "good-a.json.tmp",
        "bad-a.json",
        "good-a/b",
    ],
)
def test_other_files_are_no_marks(name: str) -> None:
    """Only names that this package writes are."""
    assert mark_of(name) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        record_to_bytes("good", {"metrics": {}}),
        record_to_bytes("scored", {}),
        record_to_bytes("scored", {"metrics": [1]}),
        record_to_bytes("scored", {"metrics": {"loss": "1"}}),
        record_to_bytes("scored", {"metrics": {"loss": True}}),
        record_to_bytes("scored", {"metrics": {"loss": 1}})[:-1],
        record_to_bytes("scored", {"metrics": {"loss": 1}}).replace(b'"loss":1', b'"loss":2'),
        b" " * (MAX_RECORD_BYTES + 1),
    ],
)
def test_a_score_that_is_not_sound_is_an_error(root: Store, content: bytes) -> None:
    """One that names the file; what no one asked for is not read."""
    folder(root).create(mark_key("scored", attempt_at(0)), content)
    assert read_marks(folder(root), attempt_at(0)).kinds == {"scored"}
    with pytest.raises(CorruptCheckpointError, match="scored-"):
        take_inventory(root, with_metrics=True)
