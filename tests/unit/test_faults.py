"""A fault plan does what it declares, to the store it wraps and to nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fsdp_ckpt.errors import AlreadyCommittedError, NotFoundError, StorageError
from fsdp_ckpt.storage.local import LocalStore
from fsdp_ckpt.storage.store import Store
from fsdp_ckpt.testing import Fault, FaultNotFiredError, FaultPlan, FaultStore

DATA = bytes(range(200))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store."""
    return LocalStore(str(tmp_path / "root"))


def write_object(store: Store, key: str = "object") -> None:
    """Write one object in two pieces, aborted where that fails, and create a small one."""
    writer = store.write(key, len(DATA))
    try:
        writer.write_at(0, memoryview(DATA)[:100])
        writer.write_at(100, memoryview(DATA)[100:])
        writer.flush()
        writer.commit()
    except StorageError:
        writer.abort()
        raise
    store.create("small", b"small")


def test_without_faults_nothing_differs(store: Store) -> None:
    """A wrapped store is a store, and its plan names every operation, of children too."""
    with FaultPlan() as plan:
        wrapped = FaultStore(store, plan)
        assert isinstance(wrapped, Store)
        assert (wrapped.url, wrapped.concurrency) == (store.url, store.concurrency)
        write_object(wrapped.child("a").child("b"), "c")
        writer = wrapped.write("d", 1)
        assert (writer.ordered, writer.part_bytes) == (False, 0)
        writer.abort()
        assert wrapped.list_folders() == ["a"]
        assert wrapped.child("a/b").list_files() == {"c": len(DATA), "small": 5}
        assert wrapped.size("a/b/c") == len(DATA)
        buffer = bytearray(7)
        wrapped.read_into("a/b/c", 150, memoryview(buffer))
        assert bytes(buffer) == DATA[150:157]
        wrapped.delete("a/b/small")
        with pytest.raises(NotFoundError):
            wrapped.read("a/b/small")
    assert [str(operation) for operation in plan.operations] == [
        "write a/b/c",
        "write_at a/b/c",
        "write_at a/b/c",
        "flush a/b/c",
        "commit a/b/c",
        "create a/b/small",
        "write d",
        "abort d",
        "list_folders ",
        "list_files a/b",
        "size a/b/c",
        "read_into a/b/c",
        "delete a/b/small",
        "read a/b/small",
    ]
    assert plan.count() == 9
    assert plan.count("write_at", "read") == 3


@pytest.mark.parametrize("nth", range(1, 7))
def test_the_nth_operation_fails(store: Store, nth: int) -> None:
    """It is not done, the error is of our tree, and what was begun can be dropped."""
    with FaultPlan(Fault("fail", nth=nth, retryable=True)) as plan:
        with pytest.raises(StorageError, match="the declared fault fail") as caught:
            write_object(FaultStore(store, plan))
        assert caught.value.retryable
    assert "small" not in store.list_files()
    assert ("object" in store.list_files()) == (nth == 6)
    assert plan.fired() == 1


def test_a_torn_write_leaves_half(store: Store) -> None:
    """Half of the bytes are there, and the error is raised."""
    with FaultPlan(Fault("tear", nth=2, verbs=("write_at",))) as plan:
        writer = FaultStore(store, plan).write("object", len(DATA))
        writer.write_at(0, memoryview(DATA)[:100])
        with pytest.raises(StorageError):
            writer.write_at(100, memoryview(DATA)[100:])
        writer.commit()
    assert store.read("object") == DATA[:150] + bytes(50)


def test_a_lost_answer_is_done(store: Store) -> None:
    """The operation took place although it raises; a second try finds that out."""
    with FaultPlan(Fault("lose_answer", verbs=("create",))) as plan:
        wrapped = FaultStore(store, plan)
        with pytest.raises(StorageError):
            wrapped.create("small", b"small")
        with pytest.raises(AlreadyCommittedError):
            wrapped.create("small", b"small")
    assert store.read("small") == b"small"


def test_a_delay_only_delays(store: Store) -> None:
    """It is done later, and another fault of the same operation happens as well."""
    delay = Fault("delay", verbs=("create",), count=2, delay_s=0.05)
    with FaultPlan(delay, Fault("fail", verbs=("create",), nth=2)) as plan:
        wrapped = FaultStore(store, plan)
        begin = time.monotonic()
        wrapped.create("a", b"a")
        with pytest.raises(StorageError):
            wrapped.create("b", b"b")
        assert time.monotonic() - begin >= 0.1
    assert store.list_files() == {"a": 1}
    assert plan.fired() == 3


def test_reads_fail_by_key(store: Store) -> None:
    """Verbs and keys select; an error of the test's own is raised as it is."""
    error = KeyboardInterrupt()
    with FaultPlan(Fault("fail", verbs=("read",), key="a/*", count=None, error=error)) as plan:
        wrapped = FaultStore(store, plan)
        wrapped.create("small", b"small")
        assert wrapped.read("small") == b"small"
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt) as caught:
                wrapped.child("a").read("small")
            assert caught.value is error


def test_a_fault_that_did_not_fire_fails_the_test(store: Store) -> None:
    """As does one that fired less often than declared; but the test's own error goes first."""
    plan = FaultPlan(Fault("fail", verbs=("create",), nth=3, count=2))
    wrapped = FaultStore(store, plan)
    wrapped.create("a", b"a")
    wrapped.create("b", b"b")
    with pytest.raises(StorageError):
        wrapped.create("c", b"c")
    with pytest.raises(FaultNotFiredError, match="fired 1 times, 3 matched"), plan:
        pass
    with pytest.raises(FaultNotFiredError, match="fired 0 times"):
        FaultPlan(Fault("fail", count=None)).check_fired()
    with pytest.raises(ZeroDivisionError), FaultPlan(Fault("fail")):
        raise ZeroDivisionError


def test_a_fault_may_be_one_ranks(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere it neither fires nor has to; the rank comes from the environment or the test."""
    fault = Fault("fail", rank=1)
    with FaultPlan(fault) as plan:
        FaultStore(store, plan).create("a", b"a")
    with FaultPlan(fault, rank=1) as plan, pytest.raises(StorageError):
        FaultStore(store, plan).create("b", b"b")
    monkeypatch.setenv("RANK", "1")
    assert FaultPlan(fault).faults == (fault,)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "explode"},
        {"kind": "fail", "verbs": ("rename",)},
        {"kind": "tear"},
        {"kind": "crash_halfway", "verbs": ("create",)},
        {"kind": "fail", "nth": 0},
        {"kind": "fail", "count": 0},
    ],
    ids=str,
)
def test_a_fault_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    """At its declaration, not as a test that passes."""
    with pytest.raises(ValueError, match=r"no such|only write_at|start at 1"):
        Fault(**wrong)


def test_threads_share_a_plan(store: Store) -> None:
    """Every operation of every thread is counted once, and each fault fires once."""
    faults = [Fault("fail", nth=n, verbs=("create",)) for n in (5, 10, 15, 20)]
    with FaultPlan(*faults) as plan:
        wrapped = FaultStore(store, plan)

        def create(i: int) -> str:
            try:
                wrapped.create(f"{i}", b"content")
            except StorageError:
                return "failed"
            return "done"

        with ThreadPoolExecutor(8) as threads:
            assert Counter(threads.map(create, range(40))) == {"failed": 4, "done": 36}
    assert plan.count("create") == 40
    assert len(store.list_files()) == 36


CRASHING = """
import sys
from fsdp_ckpt.storage.local import LocalStore
from fsdp_ckpt.testing import Fault, FaultPlan, FaultStore
root, kind, nth, *verbs = sys.argv[1:]
store = FaultStore(LocalStore(root), FaultPlan(Fault(kind, nth=int(nth), verbs=verbs)))
writer = store.write("object", 200)
writer.write_at(0, memoryview(bytes(range(100))))
writer.write_at(100, memoryview(bytes(range(100, 200))))
writer.commit()
store.create("small", b"small")
"""


@pytest.mark.parametrize(
    ("kind", "nth", "verb", "left"),
    [
        ("crash", 1, "write", {}),
        ("crash", 2, "write_at", {"object": DATA[:100] + bytes(100)}),
        ("crash_halfway", 2, "write_at", {"object": DATA[:150] + bytes(50)}),
        ("crash_after", 2, "write_at", {"object": DATA}),
        ("crash", 1, "create", {"object": DATA}),
        ("crash_after", 1, "create", {"object": DATA, "small": b"small"}),
    ],
)
def test_a_crash_kills_the_process(
    tmp_path: Path, kind: str, nth: int, verb: str, left: dict[str, bytes]
) -> None:
    """At once and for real, before, halfway through or after the operation."""
    done = subprocess.run(
        [sys.executable, "-c", CRASHING, str(tmp_path), kind, str(nth), verb],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=250,
    )
    assert done.returncode == -signal.SIGKILL
    store = LocalStore(str(tmp_path))
    assert {name: store.read(name) for name in store.list_files()} == left
