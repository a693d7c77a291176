"""A run tells what it does, in bounded space, and nothing of it holds training up or fails a save."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_ckpt import (
    CheckpointManager,
    IncompleteWriteError,
    RetentionPolicy,
    SaveOptions,
    SavePolicy,
    SpikePolicy,
    TelemetryOptions,
    TrainState,
)
from fsdp_ckpt.commit.catalog import find_checkpoints
from fsdp_ckpt.commit.inventory import take_inventory
from fsdp_ckpt.commit.prune import prune
from fsdp_ckpt.report.reading import read_telemetry
from fsdp_ckpt.storage.local import LocalStore
from fsdp_ckpt.storage.open import open_store
from fsdp_ckpt.telemetry import (
    Event,
    PrometheusEvents,
    TensorBoardEvents,
    restore_trace,
    save_trace,
    tracing,
)
from fsdp_ckpt.telemetry.log import CHUNK_BYTES, TelemetryLog
from fsdp_ckpt.telemetry.outlet import MAX_PENDING, Outlet
from fsdp_ckpt.telemetry.restore_trace import NO_RESTORE
from fsdp_ckpt.telemetry.save_trace import NO_SAVE
from fsdp_ckpt.telemetry.tracing import OFF
from fsdp_ckpt.testing import Fault, FaultPlan, FaultStore
from tests.told_runs import Told

SAVE_SPANS = ("wait", "plan", "copy", "persist", "seal", "publish", "stall")


def manager_of(root: Any, **how: Any) -> tuple[TrainState, CheckpointManager]:
    """Return a state, and a manager that saves it when asked."""
    torch.manual_seed(0)
    state = TrainState(model=nn.Linear(3, 4))
    how.setdefault("options", SaveOptions(mode="sync"))
    return state, CheckpointManager(root, state, timeout_s=60, **how)


def event(name: str = "progress", **how: Any) -> Event:
    return Event(name=name, rank=0, wall_s=1.0, monotonic_s=1.0, **how)


def told(root: Path) -> list[Event]:
    """Return what is on storage, of all starts."""
    return [e for start in read_telemetry(LocalStore(str(root))).starts for e in start.events]


# --- off ---


def test_off_nothing_is_made_asked_or_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every hook hands back what it got; no clock is read, and the traces are the same for all."""

    def refuse() -> float:
        raise AssertionError("telemetry is off, and asks for the time")

    for module in (tracing, save_trace, restore_trace):
        monkeypatch.setattr(module.time, "monotonic", refuse)
        monkeypatch.setattr(module.time, "time", refuse)
    save, restore = OFF.save(5, "async"), OFF.restore()
    assert save is NO_SAVE
    assert restore is NO_RESTORE
    action: Callable[..., Any] = lambda *_: None  # noqa: E731
    assert save.imaged(action) is action
    assert save.copied(action) is action
    assert save.publishing(action) is action
    save.has_place()
    save.planned("attempt")
    save.returned()
    save.skipped()
    save.refused(ValueError("no"))
    restore.found(5, "attempt")
    restore.lap("read")
    restore.done((), is_coordinator=True)
    OFF.event("spike", step=5)
    OFF.stepped(5)
    OFF.held(0.0)
    OFF.close()


def test_off_there_is_no_thread_and_no_folder(tmp_path: Path) -> None:
    """By default a manager starts nothing and writes nothing."""
    state, manager = manager_of(tmp_path)
    with manager:
        state.progress.step = 1
        manager.save()
        assert "fsdp_ckpt-telemetry" not in {t.name for t in threading.enumerate()}
    assert [p.name for p in tmp_path.iterdir() if p.name == "telemetry"] == []


# --- what is told ---


@pytest.mark.parametrize("mode", ["sync", "async", "lazy"])
def test_a_save_and_a_restore_are_told(tmp_path: Path, mode: Any) -> None:
    """All spans of both, each with step and attempt; a callback gets the same events in the same order."""
    heard: list[Event] = []
    options = {"telemetry": TelemetryOptions(), "on_event": heard.append}
    state, manager = manager_of(
        tmp_path, options=SaveOptions(mode=mode, writer="thread"), **options
    )
    with manager:
        state.progress.step = 7
        info = manager.save().wait()
        manager.restore()
    events = told(tmp_path)
    assert sorted(map(repr, events)) == sorted(map(repr, rounded(heard)))
    spans = {e.name: e for e in events if e.seconds is not None}
    for name in SAVE_SPANS:
        found = spans[f"save.{name}"]
        assert (found.step, found.attempt) == (7, info.attempt)
    assert spans["save.persist"].fields["bytes"] == info.num_bytes
    for name in ("find", "compare", "read", "agree", "apply", "done"):
        assert spans[f"restore.{name}"].step == 7
    (committed,) = [e for e in events if e.name == "save.committed"]
    assert committed.fields == {"mode": mode, "bytes": info.num_bytes, "world_size": 1}
    assert (heard[0].name, heard[-1].name) == ("run.started", "run.ended")


def rounded(events: list[Event]) -> list[Event]:
    """Return events as they come back from storage."""
    return [Event.from_json(json.loads(e.to_line(n))) for n, e in enumerate(events)]


def test_failed_skipped_and_deleted_are_told(tmp_path: Path) -> None:
    """With the reason; what a policy deletes too, with its bytes."""
    heard: list[Event] = []
    plan = FaultPlan(Fault("fail", nth=1, verbs=("commit",)))
    store = FaultStore(LocalStore(str(tmp_path)), plan)
    state, manager = manager_of(
        store,
        keep=RetentionPolicy(last=1),
        save=SavePolicy(every_steps=1, on_signal=False),
        on_event=heard.append,
    )
    with plan, manager:
        for step in (1, 2, 3):
            state.progress.step = step
            if step == 1:
                with pytest.raises(IncompleteWriteError):
                    manager.after_step()
            else:
                manager.after_step()
    names = {e.name: e for e in heard}
    assert "nothing was committed" in names["save.failed"].fields["error"]
    assert names["save.failed"].step == 1
    deleted = [
        e for e in heard if e.name == "retention.deleted" and e.fields["what"] == "checkpoint"
    ]
    assert [e.step for e in deleted] == [2]
    assert deleted[0].fields["bytes"] > 0
    assert next(e.step for e in heard if e.name == "progress") == 1


def test_a_rollback_and_an_order_to_end_are_told(tmp_path: Path) -> None:
    """From where to where, why, and the checkpoint that the run ends with."""
    heard: list[Event] = []
    spikes = SpikePolicy(warmup=4, window=8, patience=1, healthy_steps=2)
    saves = SavePolicy(every_steps=2)
    state, manager = manager_of(tmp_path, save=saves, spikes=spikes, on_event=heard.append)
    losses = {12: math.nan}  # once
    with manager:
        manager.restore()
        while not manager.should_stop:
            state.progress.advance()
            if len(losses) == 0 and state.progress.step == 14:
                manager.notice_preemption()
            manager.after_step(loss=losses.pop(state.progress.step, 1.0))
    events = {e.name: e for e in heard}
    back = events["rollback"]
    assert back.fields["from_step"] == 12
    assert back.step is not None
    assert back.step < 12
    assert back.fields["reason"] == events["spike"].fields["reason"] != ""
    assert events["spike"].step == 12
    assert events["preemption"].step == 14
    assert [e.step for e in heard if e.name == "save.committed"][-1] == 14


def test_an_exception_of_the_loop_is_told(tmp_path: Path) -> None:
    """A run that fails says why, before it ends."""
    _, manager = manager_of(tmp_path, telemetry=TelemetryOptions())
    with pytest.raises(ZeroDivisionError), manager:
        raise ZeroDivisionError("no such loss")
    (raised,) = [e for e in told(tmp_path) if e.name == "run.raised"]
    assert raised.fields == {"error": "ZeroDivisionError: no such loss"}


# --- nothing gets in the way ---


def test_a_store_that_refuses_telemetry_fails_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once, the saves go on, and what comes after is written."""
    plan = FaultPlan(Fault("fail", count=2, verbs=("create",), key="telemetry/*"))
    store = FaultStore(LocalStore(str(tmp_path)), plan)
    state, manager = manager_of(store, telemetry=TelemetryOptions())
    with plan, manager, caplog.at_level(logging.WARNING, "fsdp_ckpt"):
        for step in (1, 2, 3):
            state.progress.step = step
            manager.save().wait()
    said = [r.getMessage() for r in caplog.records if "telemetry" in r.getMessage()]
    assert len(said) == 1
    assert "writing telemetry failed" in said[0]
    assert [e.step for e in told(tmp_path) if e.name == "save.committed"] == [1, 2, 3]


def test_a_callback_that_raises_fails_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once per kind of event, and called again."""
    calls: list[str] = []

    def raising(event: Event) -> None:
        calls.append(event.name)
        raise RuntimeError("no network")

    state, manager = manager_of(tmp_path, on_event=raising)
    with manager, caplog.at_level(logging.WARNING, "fsdp_ckpt"):
        for step in (1, 2):
            state.progress.step = step
            manager.save()
    assert calls.count("save.committed") == 2
    said = [r for r in caplog.records if "callback for save.committed" in r.getMessage()]
    assert len(said) == 1
    assert len(manager_of(tmp_path)[1].checkpoints()) == 2


def test_a_callback_that_hangs_holds_no_one_up() -> None:
    """What comes while the queue is full is dropped and counted; nobody waits."""
    go_on, begun = threading.Event(), threading.Event()
    heard: list[Event] = []

    def hang(event: Event) -> None:
        heard.append(event)
        begun.set()
        go_on.wait()

    outlet = Outlet(None, hang, flush_s=30.0)
    outlet.put(event())
    begun.wait()
    for _ in range(MAX_PENDING + 10):
        outlet.put(event())
    go_on.set()
    outlet.close()
    assert outlet.num_dropped == 10
    assert len(heard) == MAX_PENDING + 1


# --- on storage ---


def test_a_rank_leaves_few_objects_and_bounded_bytes(tmp_path: Path) -> None:
    """However often it flushes: full objects up to the limit, and one that is growing."""
    store = LocalStore(str(tmp_path))
    header = {"format": "fsdp_ckpt.telemetry", "version": 1, "rank": 0, "world_size": 1}
    log = TelemetryLog(store, 0, header, 4 * CHUNK_BYTES)
    for n in range(2000):
        log.add(event(step=n, fields={"text": "x" * 1000}))
        if n % 50 == 49:
            log.flush()
            assert len(store.list_files()) <= 5
    sizes = store.list_files().values()
    assert 2 * CHUNK_BYTES < sum(sizes) <= 5 * CHUNK_BYTES
    log.flush()  # nothing new
    assert list(store.list_files().values()) == list(sizes)


def test_what_a_crash_leaves_twice_is_read_once(tmp_path: Path) -> None:
    """The object before is deleted after the longer one is there, or later."""
    plan = FaultPlan(Fault("fail", count=1, verbs=("delete",)))
    with plan:
        run = Told(FaultStore(LocalStore(str(tmp_path)), plan), 0, 1, 0.0)
        run.end()
        run.one(0, "progress", 1.0, step=1)
        run.end()
        assert len(LocalStore(str(tmp_path)).child(f"telemetry/{run.id}").list_files()) == 2
    (start,) = read_telemetry(LocalStore(str(tmp_path))).starts
    assert [e.name for e in start.events] == ["run.started", "progress"]
    run.one(0, "progress", 2.0, step=2)
    run.end()
    assert len(LocalStore(str(tmp_path)).child(f"telemetry/{run.id}").list_files()) == 1


def test_old_starts_go(tmp_path: Path) -> None:
    """The newest stay; folders that are no start's are left alone."""
    foreign = tmp_path / "telemetry" / "notes" / "mine.txt"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("keep me")
    for _ in range(4):
        _, manager = manager_of(tmp_path, telemetry=TelemetryOptions(max_starts=2))
        manager.close()
    assert len(read_telemetry(LocalStore(str(tmp_path))).starts) == 2
    assert foreign.read_text() == "keep me"


def test_telemetry_is_no_checkpoint(tmp_path: Path) -> None:
    """Catalog, inventory and prune see what they saw without it, and leave it alone."""
    root = LocalStore(str(tmp_path))
    state, manager = manager_of(tmp_path, telemetry=TelemetryOptions())
    with manager:
        for step in (1, 2):
            state.progress.step = step
            manager.save()
    before = told(tmp_path)
    assert [found.step for found in find_checkpoints(root)] == [2, 1]
    inventory = take_inventory(root)
    assert (inventory.loose, inventory.left_alone) == ((), ())
    plan = prune(root, RetentionPolicy(last=1, grace_s=0.0), now_s=time.time() + 1e6)
    assert [doomed.step for doomed in plan.delete] == [1]
    assert told(tmp_path) == before


def test_any_store_will_do(tmp_path: Path) -> None:
    """Through fsspec as on a disk."""
    url = f"memory://{tmp_path.name}/run"
    state, manager = manager_of(url, telemetry=TelemetryOptions())
    with manager:
        state.progress.step = 1
        manager.save()
    (start,) = read_telemetry(open_store(url)).starts
    assert "save.committed" in {e.name for e in start.events}


@pytest.mark.parametrize(
    "wrong",
    [{"flush_s": 0}, {"progress_s": -1}, {"max_bytes": 10}, {"max_starts": 0}, {"flush_s": 1e999}],
)
def test_options_are_checked(wrong: Any) -> None:
    """When they are made."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TelemetryOptions(**wrong)


def test_a_line_is_json_whatever_is_told() -> None:
    """Not finite or foreign values are no reason to lose a line."""
    line = event(
        "spike", step=3, fields={"loss": float("nan"), "what": Path("x"), "n": 99}
    ).to_line(4)
    record = json.loads(line, parse_constant=lambda _: pytest.fail("not JSON"))
    assert (record["n"], record["step"], record["what"]) == (4, 3, "x")
    assert "loss" not in record


# --- adapters ---


def test_tensorboard_gets_scalars_and_texts() -> None:
    """Of the user's own writer."""
    calls: list[tuple[Any, ...]] = []

    class Writer:
        def add_scalar(self, *args: Any) -> None:
            calls.append(args)

        def add_text(self, *args: Any) -> None:
            calls.append(args)

    events = TensorBoardEvents(Writer())
    events(event("save.persist", seconds=2.0, step=5, fields={"bytes": 4_000_000_000}))
    events(event("save.committed", step=5, fields={"bytes": 4_000_000_000}))
    events(event("rollback", seconds=1.5, step=5, fields={"reason": "loss 9"}))
    events(event("save.failed", step=6, fields={"error": "disk full"}))
    events(event("progress", step=7))
    assert calls == [
        ("checkpoint/save.persist_s", 2.0, 5),
        ("checkpoint/save.persist_GB_per_s", 2.0, 5),
        ("checkpoint/size_GB", 4.0, 5),
        ("checkpoint/rollback_s", 1.5, 5),
        ("checkpoint/save.failed", "error: disk full", 6),
    ]


def test_prometheus_text(tmp_path: Path) -> None:
    """Counters, gauges and a summary, each sample under its type; the file is there when a save ended."""
    path = tmp_path / "ckpt.prom"
    events = PrometheusEvents(path, labels={"run": 'a"b'})
    events(event("save.copy", seconds=0.5, step=5))
    assert not path.exists()
    events(event("save.copy", seconds=0.25, step=5))
    events(event("save.committed", step=5, fields={"bytes": 7}))
    text = path.read_text()
    assert text == events.text()
    lines = text.splitlines()
    labels = '{run="a\\"b",rank="0"}'
    assert f"fsdp_ckpt_saves_committed_total{labels} 1" in lines
    assert f"fsdp_ckpt_last_saved_bytes{labels} 7" in lines
    span = '{run="a\\"b",rank="0",span="save.copy"}'
    assert f"fsdp_ckpt_span_seconds_sum{span} 0.75" in lines
    assert f"fsdp_ckpt_span_seconds_count{span} 2" in lines
    typed = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    for line in lines:
        if not line.startswith("#"):
            name = line.partition("{")[0]
            assert name.removesuffix("_sum").removesuffix("_count") in typed or name in typed
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt.prom"]


def test_a_missing_folder_for_prometheus_is_logged_not_raised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As every failure of a callback."""
    state, manager = manager_of(tmp_path / "run", on_event=PrometheusEvents(tmp_path / "no" / "x"))
    with manager, caplog.at_level(logging.WARNING, "fsdp_ckpt"):
        state.progress.step = 1
        manager.save()
    assert any("callback for save.committed" in r.getMessage() for r in caplog.records)
