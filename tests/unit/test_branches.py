"""A run that has gone back stands on its new branch, whatever dies and whatever lies on the old one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_ckpt.commit import fence, publish
from fsdp_ckpt.commit.branches import BranchHistory, DataWindow, Rollback, merge_windows
from fsdp_ckpt.commit.catalog import CheckpointInfo, SkippedCheckpoint, find_checkpoints
from fsdp_ckpt.commit.locate import locate_checkpoint
from fsdp_ckpt.commit.publish import new_attempt, publish_manifest, retire_manifest
from fsdp_ckpt.commit.records import MAX_RECORD_BYTES, record_to_bytes
from fsdp_ckpt.commit.rollback import read_history, record_rollback, rollback_key
from fsdp_ckpt.errors import (
    AlreadyCommittedError,
    CorruptCheckpointError,
    IncompleteWriteError,
    StorageError,
    UnsupportedFormatError,
)
from fsdp_ckpt.storage.local import LocalStore
from fsdp_ckpt.storage.store import Store
from fsdp_ckpt.testing import Fault, FaultPlan, FaultStore
from tests.roots import attempt_at, put_checkpoint

WINDOW = DataWindow(epoch=1, start=200, stop=300)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[LocalStore]:
    """An empty root; this process has published nothing under it."""
    yield LocalStore(str(tmp_path / "run"))
    fence._raised.clear()


def go_back(root: Store, from_step: int, to_step: int, **fields: object) -> BranchHistory:
    history = read_history(root)
    options = {"attempt": attempt_at(0), "reason": "a spike", **fields}
    return record_rollback(root, history, from_step=from_step, to_step=to_step, **options)  # type: ignore[arg-type]


def standing(root: Store) -> list[tuple[int, int]]:
    """Return (generation, step) of what is found, newest first."""
    found = find_checkpoints(root)
    return [(info.generation, info.step) for info in found if isinstance(info, CheckpointInfo)]


def rollback(number: int, from_step: int, to_step: int, **fields: object) -> Rollback:
    options = {"id": attempt_at(number), "attempt": attempt_at(0), "reason": "x", **fields}
    return Rollback(generation=number, from_step=from_step, to_step=to_step, **options)  # type: ignore[arg-type]


# --- which checkpoints count ---


def test_a_higher_step_of_an_abandoned_branch_never_wins(root: LocalStore) -> None:
    """After a rollback from 43 to 20, neither 30 nor 40 is found; 20 and what lies before it is."""
    for step in (10, 20, 30, 40):
        put_checkpoint(root, step)
    assert standing(root) == [(0, 40), (0, 30), (0, 20), (0, 10)]
    go_back(root, 43, 20)
    assert standing(root) == [(0, 20), (0, 10)]
    checkpoint, skipped = locate_checkpoint(root)
    assert checkpoint.manifest.step == 20
    assert [(s.step, s.abandoned, s.torn) for s in skipped] == [
        (40, True, False),
        (30, True, False),
    ]
    assert "rollback 1 left at step 20" in skipped[0].reason
    put_checkpoint(root, 25, generation=1)
    assert standing(root) == [(1, 25), (0, 20), (0, 10)]


def test_every_branch_that_was_left_stays_left(root: LocalStore) -> None:
    """A second rollback, to a step that an abandoned branch had saved too, brings nothing of that back."""
    put_checkpoint(root, 10)
    put_checkpoint(root, 20)
    put_checkpoint(root, 30)
    go_back(root, 33, 10)
    put_checkpoint(root, 25, generation=1)
    put_checkpoint(root, 40, generation=1)
    go_back(root, 41, 25)
    assert standing(root) == [(1, 25), (0, 10)]
    go_back(root, 26, 10)
    assert standing(root) == [(0, 10)]


def test_a_damaged_checkpoint_of_an_old_branch_is_not_taken_for_damage(root: LocalStore) -> None:
    """What was left behind is reported as that, whole or not."""
    put_checkpoint(root, 10)
    manifest = put_checkpoint(root, 20)
    go_back(root, 21, 10)
    root.delete(f"step-000000020/{manifest.files[1].name}")
    skipped, found = find_checkpoints(root)
    assert isinstance(skipped, SkippedCheckpoint)
    assert skipped.abandoned
    assert isinstance(found, CheckpointInfo)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 1)), min_size=1, max_size=60))
def test_the_order_by_step_is_that_by_generation_and_step(moves: list[tuple[int, int]]) -> None:
    """A run that saves and goes back at random stands on exactly what it would have kept itself."""
    history, standing_on, everything, step = BranchHistory(), [(0, 0)], [(0, 0)], 0
    for size, is_rollback in moves:
        if not is_rollback:
            step += size
            saved = (history.generation, step)
            history.check_save(*saved)
            standing_on.append(saved)
            everything.append(saved)
            continue
        del standing_on[max(len(standing_on) - size, 1) :]
        to_step = standing_on[-1][1]
        number = history.generation + 1
        history = BranchHistory((*history.rollbacks, rollback(number, step, to_step)))
        step = to_step
    found = [c for c in everything if history.abandoned_by(*c) is None]
    assert sorted(found) == standing_on
    assert sorted(found, key=lambda c: c[1]) == standing_on


def test_what_is_not_of_the_branch_is_not_published() -> None:
    """A save that the run has left behind while it was written, and one below its branch, are refused."""
    history = BranchHistory((rollback(1, 33, 20),))
    history.check_save(1, 21)
    for generation, step in ((0, 40), (2, 40), (1, 20), (1, 5)):
        with pytest.raises(IncompleteWriteError, match=rf"step {step}\b"):
            history.check_save(generation, step)
    BranchHistory().check_save(0, 0)


def test_a_step_that_the_old_branch_has_saved_can_be_saved_again(root: LocalStore) -> None:
    """The abandoned manifest makes room as a damaged one does; a crash in between changes no branch."""
    put_checkpoint(root, 10)
    old = put_checkpoint(root, 20)
    go_back(root, 25, 10)
    new = put_checkpoint(root, 20, generation=1, attempt=new_attempt(), publish=False)
    store = root.child("step-000000020")
    with pytest.raises(AlreadyCommittedError):
        publish_manifest(store, new)
    retire_manifest(store, old.attempt)
    assert standing(root) == [(0, 10)]
    publish_manifest(store, new)
    assert standing(root) == [(1, 20), (0, 10)]


# --- what a rollback asks of training ---


def test_windows_stay_in_force_on_every_later_branch() -> None:
    """Data to skip adds up, also from branches that were left, and touching windows become one."""
    windows = [(1, 30, 40), (0, 10, 20), (0, 20, 25), (0, 50, 60)]
    one, two, three, four = (DataWindow(epoch=e, start=a, stop=b) for e, a, b in windows)
    history = BranchHistory(
        (rollback(1, 30, 20, skip=(one, two)), rollback(2, 25, 10, skip=(three, four)))
    )
    merged = DataWindow(epoch=0, start=10, stop=25)
    assert history.skipped_data == (merged, four, one) == merge_windows((four, three, two, one))


def test_the_learning_rate_is_lowered_for_a_while() -> None:
    """From the step gone back to on, for as many steps as the record says; several multiply."""
    history = BranchHistory(
        (
            rollback(1, 30, 20, lr_factor=0.5, lr_steps=10),
            rollback(2, 28, 20, lr_factor=0.5, lr_steps=4),
        )
    )
    factors = [history.lr_factor(step) for step in (19, 20, 23, 24, 29, 30)]
    assert factors == [1.0, 0.25, 0.25, 0.5, 0.5, 1.0]


def test_rollbacks_count_until_the_run_gets_past_them() -> None:
    """Three at one place are three, however they go back; one from beyond it is the first again."""
    trips = [(33, 30), (32, 30), (33, 20), (31, 30), (60, 50), (57, 50)]
    rollbacks = tuple(rollback(n, *trip) for n, trip in enumerate(trips, 1))
    counts = [BranchHistory(rollbacks[:n]).num_in_a_row() for n in range(len(trips) + 1)]
    assert counts == [0, 1, 2, 3, 4, 1, 2]


# --- the record ---


def test_a_record_says_it_all(root: LocalStore) -> None:
    """What is recorded comes back, in order, and what is returned is what is read."""
    first = go_back(root, 33, 20, skip=[WINDOW], lr_factor=0.5, lr_steps=100, reason="loss\n9.1")
    assert read_history(root) == first
    (record,) = first.rollbacks
    assert (record.generation, record.from_step, record.to_step) == (1, 33, 20)
    assert (record.reason, record.skip, record.lr_factor) == ("loss 9.1", (WINDOW,), 0.5)
    second = go_back(root, 25, 20)
    assert [r.generation for r in read_history(root).rollbacks] == [1, 2]
    assert second.rollbacks[0] == record
    assert {"rollback-0001.json", "rollback-0002.json"} <= root.list_files().keys()


@pytest.mark.parametrize("at", range(6))
@pytest.mark.parametrize("kind", ["fail", "lose_answer"])
def test_a_crash_leaves_the_old_branch_or_the_new_one(root: LocalStore, at: int, kind: str) -> None:
    """Before and after every operation of the recording, whoever comes next finds one of the two."""
    put_checkpoint(root, 20)
    put_checkpoint(root, 30)
    history = read_history(root)
    arguments = {"from_step": 33, "to_step": 20, "attempt": attempt_at(0), "reason": "x"}

    class CrashError(BaseException):
        """The process is gone."""

    crash = Fault(
        kind, nth=at + 1, verbs=("create", "list_files", "read", "size"), error=CrashError()
    )  # type: ignore[arg-type]
    operations = FaultPlan(crash)
    try:
        record_rollback(FaultStore(root, operations), history, **arguments)  # type: ignore[arg-type]
    except CrashError:
        pass
    else:
        assert operations.fired() == 0
    is_recorded = rollback_key(1) in root.list_files()
    assert standing(root) == ([(0, 20)] if is_recorded else [(0, 30), (0, 20)])
    # As the next process would, which has raised no fence yet.
    fence._raised.clear()
    go_back(root, 33, 20)
    assert standing(root) == [(0, 20)]


def test_a_lost_answer_is_resolved_by_the_id(root: LocalStore) -> None:
    """The record is there although its answer was lost: the run goes back, once."""
    put_checkpoint(root, 20)
    with FaultPlan(Fault("lose_answer", verbs=("create",), key="rollback-*")) as plan:
        history = go_back(FaultStore(root, plan), 33, 20)
    assert read_history(root) == history


def test_a_record_that_failed_is_an_error(root: LocalStore) -> None:
    """Nothing is claimed that is not there."""
    plan = FaultPlan(Fault("fail", verbs=("create",), key="rollback-*"))
    with plan, pytest.raises(StorageError):
        go_back(FaultStore(root, plan), 33, 20)
    assert read_history(root) == BranchHistory()


def test_only_one_goes_back(root: LocalStore) -> None:
    """Who decides on what another has decided already is told so, and changes nothing."""
    history = read_history(root)
    go_back(root, 33, 20)
    content = root.read(rollback_key(1))
    with pytest.raises(AlreadyCommittedError, match="another rollback"):
        record_rollback(root, history, from_step=34, to_step=10, attempt="x", reason="x")
    assert root.read(rollback_key(1)) == content


def test_a_job_that_was_followed_cannot_go_back(
    root: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator that was cut off must not turn its successor's branch over."""
    fence.pass_fence(root, new_attempt())
    mine = dict(fence._raised)
    fence._raised.clear()
    publish._renew_token()
    fence.pass_fence(root, new_attempt())
    fence._raised.update(mine)
    with pytest.raises(IncompleteWriteError, match="another job"):
        go_back(root, 33, 20)
    assert read_history(root) == BranchHistory()


def fields(**changed: object) -> dict[str, object]:
    """Return the fields of a sound record, some of them changed."""
    return {
        "generation": 1, "id": "i", "from": 33, "to": 20, "attempt": "a", "reason": "r",
        "skip": [[1, 2, 3]], "lr": [0.5, 10], "created": "", **changed,
    }  # fmt: skip


def without(name: str) -> dict[str, object]:
    return {k: v for k, v in fields().items() if k != name}


def test_a_sound_record_of_another_program_is_read(root: LocalStore) -> None:
    """Fields that this version does not know are passed over."""
    root.create(rollback_key(1), record_to_bytes("rollback", fields(more=[1])))
    assert read_history(root).generation == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[" * 100_000,
        b'{"format":"fsdp_ckpt.rollback","version":1}',
        record_to_bytes("rollback", fields())[:-1],
        record_to_bytes("rollback", fields()).replace(b'"to":20', b'"to":30'),
        record_to_bytes("good", fields()),
        record_to_bytes("rollback", fields(generation=2)),
        record_to_bytes("rollback", fields(generation=True)),
        record_to_bytes("rollback", fields(to=34)),
        record_to_bytes("rollback", fields(to=-1)),
        record_to_bytes("rollback", fields(to=2**63)),
        record_to_bytes("rollback", fields(skip=[[1, 3, 2]])),
        record_to_bytes("rollback", fields(skip=[[1, 2]])),
        record_to_bytes("rollback", fields(skip=7)),
        record_to_bytes("rollback", fields(lr=["0.5", 1])),
        record_to_bytes("rollback", fields(lr=[2.0, 1])),
        record_to_bytes("rollback", fields(lr=[0, 1])),
        record_to_bytes("rollback", fields(reason=None)),
        *(record_to_bytes("rollback", without(name)) for name in fields()),
        b" " * (MAX_RECORD_BYTES + 1),
    ],
)
def test_a_record_that_is_not_sound_stops_the_search(root: LocalStore, content: bytes) -> None:
    """Which branch is the current one is not guessed; the error is one line that names the record."""
    put_checkpoint(root, 30)
    root.create(rollback_key(1), content)
    with pytest.raises(CorruptCheckpointError, match=r"rollback-0001\.json") as caught:
        list(find_checkpoints(root))
    assert len(str(caught.value).splitlines()) == 1


def test_a_newer_record_asks_for_an_upgrade(root: LocalStore) -> None:
    """What a later version has decided is not passed over either."""
    content = record_to_bytes("rollback", fields()).replace(b'"version":1', b'"version":2')
    root.create(rollback_key(1), content)
    with pytest.raises(UnsupportedFormatError, match="upgrade"):
        list(find_checkpoints(root))


@pytest.mark.parametrize(("there", "missing"), [([2], 1), ([1, 3], 2), ([999_999_999], 1)])
def test_a_missing_record_stops_the_search(
    root: LocalStore, there: list[int], missing: int
) -> None:
    """Records without the ones before them tell less than the run knew."""
    for number in there:
        root.create(rollback_key(number), record_to_bytes("rollback", fields(generation=number)))
    with pytest.raises(CorruptCheckpointError, match=rollback_key(missing)):
        list(find_checkpoints(root))


@pytest.mark.parametrize(
    "name",
    ["rollback-1.json", "rollback-0001.json.tmp", "rollback-00001.json", "x-rollback-0001.json"],
)
def test_other_files_are_no_records(root: LocalStore, name: str) -> None:
    """Only names that this package writes are rollbacks."""
    root.create(name, b"?")
    assert read_history(root) == BranchHistory()


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataWindow(epoch=0, start=3, stop=3),
        lambda: DataWindow(epoch=-1, start=3, stop=4),
        lambda: DataWindow(epoch=0, start=-1, stop=4),
        lambda: rollback(1, 20, 21),
        lambda: rollback(0, 20, 10),
        lambda: rollback(1, 20, 10, lr_factor=0.0),
        lambda: rollback(1, 20, 10, lr_factor=1.5),
        lambda: rollback(1, 20, 10, lr_steps=-1),
    ],
)
def test_nonsense_is_refused_when_it_is_made(make: Callable[[], object]) -> None:
    """Before anything is written."""
    with pytest.raises(ValueError, match=r"\d"):
        make()


def test_a_record_has_a_size(root: LocalStore) -> None:
    """Too many windows for one record are refused before anything is written; reasons are cut."""
    skip = [DataWindow(epoch=0, start=2 * i, stop=2 * i + 1) for i in range(10_000)]
    with pytest.raises(ValueError, match="bytes"):
        go_back(root, 33, 20, skip=skip)
    assert root.list_files() == {}
    history = go_back(root, 33, 20, reason="x" * 10**6)
    assert len(history.rollbacks[0].reason) == 500
