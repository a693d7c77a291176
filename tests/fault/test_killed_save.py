"""A save may die anywhere: the old or the new checkpoint is there, whole, and the next save succeeds.

Run as a program, this module imports torch once and forks for every kill point: one child saves and kills
itself at its n-th change of the file system, another one, fresh, restores and saves again.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fsdp_ckpt import AlreadyCommittedError, CheckpointManager, TrainState
from fsdp_ckpt.plan.image import BLOCK_BYTES
from tests.bits import live_bits

pytestmark = pytest.mark.slow

FIRST, OVER_OLD, OVER_DEAD, AFTER_OWN = SCENARIOS = (
    "first save",
    "over an earlier checkpoint",
    "over a dead attempt of the same step",
    "after a save of the same manager",  # the file is begun without a name
)
MODES = ("before", "halfway", "after")
OLD_STEP, NEW_STEP = 1, 2
# What changes a file system, whether or not a save uses it.
CHANGES = (
    *("mkdir", "open", "posix_fallocate", "pwrite", "write", "fsync", "link", "unlink"),
    *("rename", "replace", "rmdir", "truncate", "ftruncate", "pwritev", "writev", "fdatasync"),
)
# ftruncate is of a new image, in memory.
EXPECTED = {
    "ftruncate",
    "mkdir",
    "open",
    "posix_fallocate",
    "pwrite",
    "write",
    "fsync",
    "link",
    "unlink",
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What happened at every kill point of every scenario."""
    root = tmp_path_factory.mktemp("killed")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.fault.test_killed_save", str(root)],
        cwd=Path(__file__).parents[2],
        env=env,
        stdout=subprocess.PIPE,
        timeout=550,
        check=False,
    )
    assert done.returncode == 0
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_save_may_be_killed_anywhere(reports: dict[str, Any], scenario: str) -> None:
    """Before, halfway and after each change of the file system: old or new to the bit, and saved again."""
    report = reports[scenario]
    changes, kills = report["changes"], report["kills"]
    assert len(changes) > 10
    assert set(changes) == EXPECTED - ({"ftruncate"} if scenario == AFTER_OWN else set())
    # A kill that did not happen would prove nothing.
    writes = [i for i, name in enumerate(changes) if name in ("pwrite", "write")]
    due = {(mode, i) for i in range(len(changes)) for mode in ("before", "after")}
    due |= {("halfway", i) for i in writes}
    assert {(kill["mode"], kill["at"]) for kill in kills} == due
    assert all(kill["died"] for kill in kills)
    failed = [kill for kill in kills if kill["trouble"]]
    assert failed == []
    # The link of the manifest is the commit. Before it, once the header is in the shard, a restore publishes.
    whole = header_of(changes)
    for kill in kills:
        is_new = kill["at"] > whole or (kill["at"] == whole and kill["mode"] == "after")
        before = "fresh" if scenario == FIRST else OLD_STEP
        assert kill["restored"] == (NEW_STEP if is_new else before), kill
    print(f"{scenario}: {len(kills)} kills at {len(changes)} changes")


# --- the program ---


def header_of(changes: list[str]) -> int:
    """Return the index of the change that makes the shard file whole: its last write."""
    return max(i for i, name in enumerate(changes) if name == "pwrite")


class Job:
    """All of a run's state as a function of ``seed``: more than one block of data, and small things."""

    def __init__(self, root: Path, seed: int, step: int) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.model.register_buffer("large", torch.full((BLOCK_BYTES,), seed, dtype=torch.uint8))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.rand_like(parameter)
        self.optimizer.step()
        self.state = TrainState(model=self.model, optimizer=self.optimizer)
        self.state.progress.step = step
        self.manager = CheckpointManager(root, self.state)
        self._root = root

    def become(self, seed: int, step: int) -> None:
        """Take the state that a fresh job of these has, in place."""
        other = type(self)(self._root, seed, step)
        self.model.load_state_dict(other.model.state_dict())
        self.optimizer.load_state_dict(other.optimizer.state_dict())
        self.state.progress.step = step

    def bits(self) -> dict[str, Any]:
        return live_bits(self.model, self.optimizer, progress=self.state.progress)


class Killer:
    """Counts the changes that this process makes, and kills it at one of them.

    Args:
        at: Index of the change among those of its name, since threads make theirs in any order; -1 for none.
        mode: Just before it, after half of a write, or just after.
        name: Of the change.
    """

    def __init__(self, at: int, mode: str, name: str) -> None:
        self.at, self.mode, self.name = at, mode, name
        self.changes: list[str] = []
        self._lock = threading.RLock()
        for name in CHANGES:
            setattr(os, name, self._watch(name, getattr(os, name)))

    def _watch(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def change(*args: Any, **kwargs: Any) -> Any:
            makes_file = name == "open" and (
                args[1] & os.O_CREAT or args[1] & os.O_TMPFILE == os.O_TMPFILE
            )
            if name == "open" and not makes_file:
                return function(*args, **kwargs)
            with self._lock:  # nothing else happens between the change and the kill
                is_due = name == self.name and self.changes.count(name) == self.at
                self.changes.append(name)
                if is_due and self.mode == "before":
                    os.kill(os.getpid(), signal.SIGKILL)
                if is_due and self.mode == "halfway":
                    fd, data, *rest = args
                    function(fd, data[: len(data) // 2], *rest)
                    os.kill(os.getpid(), signal.SIGKILL)
                result = function(*args, **kwargs)
                if is_due:
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

        return change


def in_child(action: Callable[[], Any]) -> tuple[int, Any]:
    """Run ``action`` in a forked process; return its exit code and what it returned, by JSON."""
    if len(os.listdir("/proc/self/task")) != 1:
        raise AssertionError("a process with threads must not fork")
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code, write = 1, os.write
        try:
            write(writing, json.dumps(action()).encode())
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        sent = pipe.read()
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), json.loads(sent) if sent else None


def save(
    root: Path,
    seed: int,
    step: int,
    at: int = -1,
    mode: str = "",
    name: str = "",
    *,
    after_own: bool = False,
) -> list[str]:
    """Save, as the first save of a manager or its second one; return the changes made."""
    if after_own:
        job = Job(root, OLD_STEP, OLD_STEP)
        job.manager.save(mode="sync")
        job.become(seed, step)
    else:
        job = Job(root, seed, step)
    killer = Killer(at, mode, name)
    job.manager.save(mode="sync")
    return killer.changes


def look(root: Path, states: dict[Any, Any]) -> dict[str, Any]:
    """Restore what is there, save the step that was killed with other content, restore that.

    Returns:
        What was restored first, a step or ``"fresh"``, and in words what is wrong.
    """
    trouble = []
    job = Job(root, seed=99, step=0)
    before = job.bits()
    report = job.manager.restore(allow_torn=True)
    expected = before if report.is_fresh else states[report.step]
    if job.bits() != expected:
        trouble.append(f"not the state of step {report.step}")
    again = Job(root, seed=3, step=NEW_STEP)
    try:
        again.manager.save(mode="sync")
    except AlreadyCommittedError:
        if report.step != NEW_STEP:
            trouble.append("cannot be saved again, and was not restored")
    else:
        if report.step == NEW_STEP:
            trouble.append("saved twice")
        last = Job(root, seed=98, step=0)
        if last.manager.restore().step != NEW_STEP or last.bits() != states["again"]:
            trouble.append("the next save is not restored")
    return {"restored": "fresh" if report.is_fresh else report.step, "trouble": trouble}


def prepare(root: Path, scenario: str) -> None:
    """Make what a scenario begins with."""
    if scenario in (FIRST, AFTER_OWN):
        return
    root.mkdir()
    code, changes = in_child(partial(save, root, OLD_STEP, OLD_STEP))
    if code != 0:
        raise AssertionError("the first save failed")
    if scenario == OVER_DEAD:
        last = changes.count("pwrite") - 1
        code, _ = in_child(partial(save, root, 4, NEW_STEP, last, "before", "pwrite"))
        if code != -signal.SIGKILL:
            raise AssertionError(f"the dead attempt ended with {code}")


def run_scenario(folder: Path, scenario: str, states: dict[Any, Any]) -> dict[str, Any]:
    """Kill a save at each of its changes; return the changes, and per kill what became of it."""
    prepare(folder / "begin", scenario)

    def fresh_copy() -> Path:
        root = folder / "run"
        shutil.rmtree(root, ignore_errors=True)
        if (folder / "begin").exists():
            shutil.copytree(folder / "begin", root)
        return root

    root = fresh_copy()
    save_new = partial(save, root, NEW_STEP, NEW_STEP, after_own=scenario == AFTER_OWN)
    code, changes = in_child(save_new)
    if code != 0:
        raise AssertionError("a save that nothing kills failed")
    kills = []
    for at, name in enumerate(changes):
        for mode in MODES if name in ("pwrite", "write") else ("before", "after"):
            fresh_copy()
            code, _ = in_child(partial(save_new, changes[:at].count(name), mode, name))
            died = code == -signal.SIGKILL
            code, found = in_child(partial(look, root, states))
            found = found or {"restored": None, "trouble": [f"ended with {code}"]}
            kills.append({"at": at, "change": name, "mode": mode, "died": died, **found})
    return {"changes": changes, "kills": kills}


def main() -> None:
    """Run all scenarios below the folder of the first argument; print what happened as JSON."""
    torch.set_num_threads(1)
    logging.getLogger("fsdp_ckpt").setLevel(
        logging.ERROR
    )  # passed-over checkpoints are the rule here
    folder = Path(sys.argv[1])
    states: dict[Any, Any] = {
        step: Job(folder, seed=step, step=step).bits() for step in (OLD_STEP, NEW_STEP)
    }
    states["again"] = Job(folder, seed=3, step=NEW_STEP).bits()
    reports = {}
    for scenario in SCENARIOS:
        (folder / scenario).mkdir()
        reports[scenario] = run_scenario(folder / scenario, scenario, states)
        shutil.rmtree(folder / scenario)
    print(json.dumps(reports))


if __name__ == "__main__":
    main()
