"""Pruning deletes exactly what was decided, and a crash leaves each checkpoint whole or gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fsdp_ckpt.commit import fence
from fsdp_ckpt.commit.catalog import CheckpointInfo, find_checkpoints, step_folder
from fsdp_ckpt.commit.checkpoint import Checkpoint
from fsdp_ckpt.commit.fence import pass_fence, read_fences
from fsdp_ckpt.commit.marks import add_mark, pin, read_marks, remove_mark
from fsdp_ckpt.commit.prune import prune
from fsdp_ckpt.commit.publish import publish_manifest, read_manifest
from fsdp_ckpt.commit.recover import find_complete_attempt
from fsdp_ckpt.commit.retention import RetentionPolicy
from fsdp_ckpt.commit.rollback import read_history, record_rollback
from fsdp_ckpt.commit.verify import find_damage
from fsdp_ckpt.errors import NotFoundError
from fsdp_ckpt.storage.fsspec_store import FsspecStore
from fsdp_ckpt.storage.local import LocalStore
from fsdp_ckpt.storage.store import Store
from fsdp_ckpt.testing import Fault, FaultPlan, FaultStore
from fsdp_ckpt.testing.faults import MUTATING
from tests.roots import attempt_at, now_at, put_checkpoint, tree

LATER = now_at(100)
RIVAL = "fedcba987654"
KEEP_ONE = RetentionPolicy(last=1)


class CrashError(BaseException):
    """The process is gone: nothing of it runs any more."""


@pytest.fixture(params=["local", "memory"])
def root(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Store]:
    """An empty root on either kind of store; this process has published nothing under it."""
    if request.param == "local":
        yield LocalStore(str(tmp_path / "run"))
    else:
        yield FsspecStore(f"memory:/{tmp_path}/run")
    fence._raised.clear()


def whole_steps(root: Store) -> list[int]:
    """Return the steps that discovery finds, each read to the last byte."""
    steps = [info.step for info in find_checkpoints(root) if isinstance(info, CheckpointInfo)]
    for step in steps:
        assert list(find_damage(Checkpoint.open(root.child(step_folder(step))))) == []
    return steps


def rotten(root: Store) -> list[int]:
    """Return the steps that have a manifest and lack a file: neither whole nor gone."""
    return [
        f.step
        for f in find_checkpoints(root)
        if not isinstance(f, CheckpointInfo) and not f.torn and not f.abandoned
    ]


def test_exactly_the_right_set_stays(root: Store) -> None:
    """Of 900, 1000, 9000, 10000, a torn one, a foreign folder, a pinned one and one of a dead branch."""
    for step in (800, 900, 1000, 9000, 10000):
        put_checkpoint(root, step)
    put_checkpoint(root, 10500, ranks=[0], publish=False)
    put_checkpoint(root.child("mine"), 5)
    put_checkpoint(root, 11000)
    pin(root, 900)
    record_rollback(
        root, read_history(root), from_step=11100, to_step=10000, attempt="x", reason="x"
    )
    put_checkpoint(root, 10001, generation=1)
    foreign = {f"mine/{key}" for key in tree(root.child("mine"))}
    policy = RetentionPolicy(last=2)
    before = tree(root)
    later = LATER + 10**9  # the rollback above was made by a real clock
    planned = prune(root, policy, now_s=later, dry_run=True)
    assert tree(root) == before
    plan = prune(root, policy, now_s=later)
    assert plan == planned
    assert [k.step for k in plan.keep] == [10001, 10000, 900]
    assert whole_steps(root) == [10001, 10000, 900]
    assert [(d.step, d.what) for d in plan.delete] == [
        (800, "checkpoint"),
        (1000, "checkpoint"),
        (9000, "checkpoint"),
        (10500, "attempt"),
        (11000, "checkpoint"),
    ]
    left = {key.split("/")[0] for key in tree(root)}
    steps = {step_folder(step) for step in (900, 10000, 10001)}
    assert left - steps == {"mine", "rollback-0001.json", *root.list_files()}
    assert foreign <= tree(root)
    assert prune(root, policy, now_s=later).delete == ()


def test_nothing_of_a_deleted_checkpoint_is_left(root: Store) -> None:
    """Neither its marks nor what a repair and a killed commit have left beside it."""
    newer, manifest = put_checkpoint(root, 20), put_checkpoint(root, 10)
    add_mark(root, 20, newer.attempt, "good")
    add_mark(root, 10, manifest.attempt, "good")
    add_mark(root, 10, manifest.attempt, "scored", metrics={"loss": 1.0})
    for name in ("damaged-0123456789ab.json", "manifest.json.0123abcd.tmp", "manifest.json.claim"):
        root.create(f"step-000000010/{name}", b"x")
    prune(root, KEEP_ONE, now_s=LATER)
    assert [key for key in tree(root) if not key.startswith("step-000000020/")] == []


def test_a_failed_save_deletes_nothing(root: Store) -> None:
    """A torn attempt takes no checkpoint's place, whatever its step."""
    put_checkpoint(root, 10)
    put_checkpoint(root, 20, ranks=[0], publish=False)
    assert prune(root, KEEP_ONE, now_s=now_at(0)).delete == ()
    assert whole_steps(root) == [10]


def test_an_attempt_under_way_stays(root: Store) -> None:
    """Another job's, in a folder of its own or beside a checkpoint that goes; its save then succeeds."""
    put_checkpoint(root, 10)
    put_checkpoint(root, 20)
    now = attempt_at(99, RIVAL)
    put_checkpoint(root, 10, attempt=now, ranks=[1], publish=False)
    put_checkpoint(root, 30, attempt=now, ranks=[1], publish=False)
    prune(root, KEEP_ONE, now_s=LATER)
    assert whole_steps(root) == [20]
    manifest = put_checkpoint(root, 30, attempt=now, ranks=[0], publish=False)
    other = root.child(f"step-000000030/{now}").list_files()
    assert len(other) == 2
    assert manifest.attempt == now
    assert f"step-000000010/{now}/rank-00001-of-00002.safetensors" in tree(root)


def test_what_recovery_is_about_to_publish_stays(root: Store) -> None:
    """A complete attempt above the newest checkpoint, until a job that follows has left it behind."""
    put_checkpoint(root, 10)
    put_checkpoint(root, 20, publish=False)
    assert prune(root, KEEP_ONE, now_s=LATER).delete == ()
    store = root.child(step_folder(20))
    assert find_complete_attempt(store, read_fences(root)) is not None
    pass_fence(root, attempt_at(50, RIVAL))
    assert [d.step for d in prune(root, KEEP_ONE, now_s=LATER).delete] == [20]
    assert whole_steps(root) == [10]


def test_a_complete_attempt_of_an_abandoned_branch_goes(root: Store) -> None:
    """It must not be published: the run has left it."""
    put_checkpoint(root, 10)
    put_checkpoint(root, 20, publish=False)
    record_rollback(root, read_history(root), from_step=25, to_step=10, attempt="x", reason="x")
    # Fences apart: the job that went back was this attempt's.
    for name in root.list_files():
        if name.startswith("resumed-"):
            root.delete(name)
    assert [d.step for d in prune(root, KEEP_ONE, now_s=LATER).delete] == [20]


def test_damage_is_left_for_a_repair(root: Store) -> None:
    """Nothing in its folder is touched, not even attempts beside it."""
    put_checkpoint(root, 30)
    manifest = put_checkpoint(root, 20)
    put_checkpoint(root, 20, attempt=attempt_at(1), ranks=[0], publish=False)
    root.delete(f"step-000000020/{manifest.files[1].name}")
    before = tree(root.child(step_folder(20)))
    plan = prune(root, KEEP_ONE, now_s=LATER)
    assert (plan.left_alone, plan.delete) == ((20,), ())
    assert tree(root.child(step_folder(20))) == before


# --- crashes ---


def prepare(root: Store) -> None:
    """Put what a prune has to delete: a marked checkpoint, one beside a dead attempt, and a torn one."""
    put_checkpoint(root, 10)
    add_mark(root, 10, attempt_at(10 / 3600), "good")
    put_checkpoint(root, 20)
    put_checkpoint(root, 20, attempt=attempt_at(1), ranks=[0], publish=False)
    put_checkpoint(root, 25, ranks=[1], publish=False)
    put_checkpoint(root, 30)
    add_mark(root, 30, attempt_at(30 / 3600), "good")


@pytest.mark.parametrize("kind", ["fail", "lose_answer"])
@pytest.mark.parametrize("hours", [100.0, 1.0])
def test_a_crash_at_any_operation_leaves_each_checkpoint_whole_or_gone(
    make_root: Callable[[], Store], kind: str, hours: float
) -> None:
    """Before and after each change; the next prune finishes, also what is too young to be a dead attempt."""
    base = make_root()
    prepare(base)
    with FaultPlan() as plan:
        prune(FaultStore(base, plan), KEEP_ONE, now_s=now_at(hours))
    expected, num_changes = tree(base), plan.count()
    assert num_changes > 10
    for at in range(num_changes):
        root = make_root()
        prepare(root)
        crash = Fault(kind, nth=at + 1, verbs=MUTATING, error=CrashError())  # type: ignore[arg-type]
        with FaultPlan(crash) as plan, pytest.raises(CrashError):
            prune(FaultStore(root, plan), KEEP_ONE, now_s=now_at(hours))
        assert rotten(root) == [], f"at {plan.operations[-1]}"
        assert whole_steps(root)[0] == 30
        # Recovery of what the crash has left finds whole checkpoints too, or none.
        for step in (10, 20):
            store = root.child(step_folder(step))
            if step not in whole_steps(root) and store.list_folders():
                found = find_complete_attempt(store, read_fences(root))
                assert found is None or len(found.files) == 2
        prune(root, KEEP_ONE, now_s=now_at(hours))
        assert tree(root) == expected, f"after a crash at {at}"


@pytest.fixture
def make_root(tmp_path: Path) -> Callable[[], Store]:
    """Return what makes an empty root in memory, each time another one: on a disk every change is synced."""
    number = iter(range(10**6))
    return lambda: FsspecStore(f"memory:/{tmp_path}/run-{next(number)}")


def test_recovery_of_a_half_deleted_one_does_not_bring_half_of_it_back(
    make_root: Callable[[], Store],
) -> None:
    """What a crash leaves and recovery then publishes is a whole checkpoint, which the next prune takes."""
    for at in range(1, 7):
        root = make_root()
        prepare(root)
        crash = Fault("fail", nth=at, verbs=("delete",), error=CrashError())
        with FaultPlan(crash) as plan, pytest.raises(CrashError):
            prune(FaultStore(root, plan), KEEP_ONE, now_s=LATER)
        for step in (10, 20):
            store = root.child(step_folder(step))
            if step in whole_steps(root) or not store.list_folders():
                continue
            found = find_complete_attempt(store, read_fences(root))
            if found is not None:
                publish_manifest(store, found)
                assert step in whole_steps(root)
        prune(root, KEEP_ONE, now_s=LATER)
        assert whole_steps(root) == [30]


# --- pins ---


def test_a_pin_keeps_and_unpinning_lets_go(root: Store) -> None:
    """Pinned twice is pinned."""
    for step in (10, 20, 30):
        put_checkpoint(root, step)
    assert pin(root, 10, note="paper")
    assert not pin(root, 10)
    prune(root, KEEP_ONE, now_s=LATER)
    assert whole_steps(root) == [30, 10]
    remove_mark(root, 10, read_manifest(root.child(step_folder(10))).attempt, "pinned")
    prune(root, KEEP_ONE, now_s=LATER)
    assert whole_steps(root) == [30]


def test_what_is_not_there_cannot_be_pinned(root: Store) -> None:
    """No folder, and a torn one; nothing is left by trying."""
    put_checkpoint(root, 20, publish=False)
    before = tree(root)
    for step in (10, 20):
        with pytest.raises(NotFoundError):
            pin(root, step)
    assert tree(root) == before


class Meanwhile(FaultStore):
    """A store whose user is not alone: something happens before its n-th operation of a kind."""

    def __init__(self, store: Store, plan: FaultPlan, prefix: str = "") -> None:
        super().__init__(store, plan, prefix)
        self.happens: dict[tuple[str, str], Callable[[], object]] = {}

    def child(self, key: str) -> Meanwhile:
        """Return the child, where the same happens."""
        child = Meanwhile(self._store.child(key), self._plan, f"{self._prefix}{key}/")
        child.happens = self.happens
        return child

    def _run(self, verb, key, act):  # type: ignore[no-untyped-def]
        happens = self.happens.pop((verb, f"{self._prefix}{key}".rstrip("/")), None)
        if happens is not None:
            happens()
        return super()._run(verb, key, act)


def test_a_pin_that_comes_while_pruning_is_kept(root: Store) -> None:
    """Right before the mark of the deletion, the checkpoint stays; right after it, the pin is refused."""
    for step in (10, 20):
        put_checkpoint(root, step)
    attempt = read_manifest(root.child(step_folder(10))).attempt
    watched = Meanwhile(root, FaultPlan())
    watched.happens = {("create", f"step-000000010/pruned-{attempt}.json"): lambda: pin(root, 10)}
    prune(watched, KEEP_ONE, now_s=LATER)
    assert watched.happens == {}
    assert whole_steps(root) == [20, 10]
    store = root.child(step_folder(10))
    assert read_marks(store, attempt).kinds == {"pinned"}
    remove_mark(root, 10, attempt, "pinned")

    def pin_late() -> None:
        with pytest.raises(NotFoundError, match="being deleted"):
            pin(root, 10)

    watched.happens = {("delete", "step-000000010/manifest.json"): pin_late}
    prune(watched, KEEP_ONE, now_s=LATER)
    assert watched.happens == {}
    assert whole_steps(root) == [20]


def test_what_was_saved_again_meanwhile_is_not_deleted(root: Store) -> None:
    """Another attempt's manifest under the same step is another checkpoint."""
    put_checkpoint(root, 20)
    old = put_checkpoint(root, 10)
    new = put_checkpoint(root, 10, attempt=attempt_at(50, RIVAL), publish=False)
    store = root.child(step_folder(10))

    def replace() -> None:
        store.delete("manifest.json")
        publish_manifest(store, new)

    watched = Meanwhile(root, FaultPlan())
    watched.happens = {("create", f"step-000000010/pruned-{old.attempt}.json"): replace}
    prune(watched, KEEP_ONE, now_s=LATER)
    assert watched.happens == {}
    assert read_manifest(store) == new
    assert whole_steps(root) == [20, 10]
    assert read_marks(store, old.attempt).kinds == frozenset()


def test_an_intent_that_came_to_nothing_is_forgotten(root: Store) -> None:
    """What was about to be deleted and is to stay now can be pinned again."""
    manifest = put_checkpoint(root, 10)
    add_mark(root, 10, manifest.attempt, "pruned")
    prune(root, KEEP_ONE, now_s=LATER)
    assert whole_steps(root) == [10]
    assert pin(root, 10)
