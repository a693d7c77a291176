"""A save may crash at any operation of its store: the old or the new checkpoint is there, and saving goes on.

On local files, on S3, and on a memory that another process serves.

Run as a program, this module imports torch once and forks for every crash. A process that lives on looks with
fresh managers after each of them: it has listed the store before, and must see what is there now.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_ckpt.commit.prune import prune
from fsdp_ckpt.commit.retention import RetentionPolicy
from fsdp_ckpt.errors import AlreadyCommittedError, IncompleteWriteError, NotFoundError
from fsdp_ckpt.plan.image import BLOCK_BYTES
from fsdp_ckpt.storage.fsspec_store import FsspecStore
from fsdp_ckpt.storage.open import open_store
from fsdp_ckpt.storage.store import Store
from fsdp_ckpt.testing import Fault, FaultPlan, FaultStore
from fsdp_ckpt.testing.faults import MUTATING
from tests.fault.served_store import ServedStore, serve_store
from tests.fault.test_killed_save import Job, in_child
from tests.s3.servers import S3Place, make_session, serve_s3

pytestmark = pytest.mark.slow

STORES = ("local", "memory", "s3")
FIRST = "first save"
OVER_TWO = "over two checkpoints"
OVER_DEAD = "over a dead attempt"
OVER_WHOLE = "over a dead attempt whose file is whole"
AFTER_OWN = "after a save of the same manager"  # a local file is begun without a name
FAILING = "a save that fails at its commit"
PRUNING = "deleting what is no longer kept"
SCENARIOS = (FIRST, OVER_TWO, OVER_DEAD, OVER_WHOLE, AFTER_OWN, FAILING, PRUNING)
# Steps, and seeds of their content; saved again, a step has another seed.
OLDER, OLD, NEW, NEXT = 0, 1, 2, 3
AGAIN = 7
PART_BYTES = 5 * 1024 * 1024  # S3's smallest
VERBS = {"write", "write_at", "flush", "commit", "create"}
# What a fresh process restores where the save under test came to nothing: seed and step.
BEFORE = {
    FIRST: "fresh",
    OVER_TWO: [OLD, OLD],
    OVER_DEAD: [OLD, OLD],
    OVER_WHOLE: [AGAIN, NEW],
    AFTER_OWN: [OLD, OLD],
    FAILING: "fresh",
    PRUNING: [NEW, NEW],
}
# What is expected beside: to the bit, or where it is being deleted not at all.
BESIDE = {
    OVER_TWO: (OLDER, OLD),
    OVER_DEAD: (OLD,),
    OVER_WHOLE: (OLD,),
    AFTER_OWN: (OLD,),
    PRUNING: (OLDER, OLD),
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What happened at every crash of every scenario, by store."""
    folder = tmp_path_factory.mktemp("crashes")
    with serve_s3("juicefs") as server:
        place = S3Place(server)
        program = [sys.executable, "-m", "tests.fault.test_crash_points"]
        done = subprocess.run(
            [*program, str(folder), place.url, json.dumps(place.options)],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            timeout=1100,
            check=False,
        )
        assert done.returncode == 0
        yield json.loads(done.stdout)


@pytest.mark.s3
@pytest.mark.timeout(1200)  # the first one waits for the crashes of all
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("store", STORES)
def test_a_save_may_crash_at_any_operation(
    reports: dict[str, Any], store: str, scenario: str
) -> None:
    """Before, halfway through and after each operation: old or new to the bit, and saved again."""
    report = reports[store][scenario]
    operations, crashes = report["operations"], report["crashes"]
    fails = scenario == FAILING
    if scenario == PRUNING:
        assert set(operations) == {"create", "delete"}
    else:
        others = {"create", "abort"} if fails else set()
        others |= {"name"} if scenario == AFTER_OWN and store == "local" else set()
        assert set(operations) == VERBS ^ others
    # A crash that did not happen would prove nothing.
    assert [(c["at"], c["moment"]) for c in crashes] == list(crash_points(operations, scenario))
    assert all(crash["died"] for crash in crashes)
    assert [trouble for crash in crashes for trouble in crash["trouble"]] == []
    for crash in crashes:
        is_new = scenario == PRUNING or is_whole(store, operations, crash["at"], crash["moment"])
        assert crash["restored"] == ([NEW, NEW] if is_new else BEFORE[scenario]), crash
    print(f"{store}, {scenario}: {len(crashes)} crashes at {len(operations)} operations")


def is_whole(store: str, operations: Sequence[str], at: int, moment: str) -> bool:
    """Whether a crash leaves a whole shard file: the next start publishes it where that was not done."""
    # On S3 an object appears when it is committed; elsewhere it is whole when its last bytes are.
    verb = "commit" if store == "s3" else "write_at"
    last = len(operations) - 1 - operations[::-1].index(verb)
    if "abort" in operations:  # the commit did nothing, and the abort takes away what is there
        return store != "s3" and moment != "crash_after"
    return at > last or (at == last and moment == "crash_after")


def crash_points(operations: Sequence[str], scenario: str) -> Iterator[tuple[int, str]]:
    """Yield (index of the operation, moment); of one that fails what follows, of two the second.

    After an operation is before the next one, since nothing else changes the store; only after the last one
    is a point of its own.
    """
    start = operations.index("commit") + 1 if scenario == FAILING else 0
    if scenario == AFTER_OWN:  # the first save publishes last, and its fence before that
        start = [at for at, verb in enumerate(operations) if verb == "create"][1] + 1
    for at in range(start, len(operations)):
        yield at, "crash"
        if operations[at] == "write_at":
            yield at, "crash_halfway"
    yield len(operations) - 1, "crash_after"


# --- the program ---

Opener = Callable[[str], Store]
Bits = dict[tuple[int, int], Any]  # by seed and step


class LargerJob(Job):
    """Its state takes more than one part of an upload, too."""

    def __init__(self, root: Path | Store, seed: int, step: int) -> None:
        super().__init__(root, seed, step)
        more = torch.full((PART_BYTES - BLOCK_BYTES + 1,), seed, dtype=torch.uint8)
        self.model.register_buffer("more", more)


def save(root: Store, steps: Sequence[tuple[int, int]], *faults: Fault) -> list[str]:
    """Save by seed and step, one after the other, the last one under faults; return its operations."""
    *begin, (seed, step) = steps
    for its_seed, its_step in begin:
        with LargerJob(root, its_seed, its_step).manager as manager:
            manager.save(mode="sync")
    plan = FaultPlan(*faults)
    job = LargerJob(FaultStore(root, plan), seed, step)
    try:
        job.manager.save(mode="sync")
    except IncompleteWriteError:
        if not faults:
            raise
    return [operation.verb for operation in plan.operations if operation.verb in MUTATING]


def save_twice(root: Store, *faults: Fault) -> list[str]:
    """Save twice by one manager under faults; return the operations of both."""
    plan = FaultPlan(*faults)
    job = LargerJob(FaultStore(root, plan), OLD, OLD)
    job.manager.save(mode="sync")
    job.become(NEW, NEW)
    job.manager.save(mode="sync")
    return [operation.verb for operation in plan.operations if operation.verb in MUTATING]


def prune_two(root: Store, *faults: Fault) -> list[str]:
    """Save three checkpoints, delete all but the newest under faults; return the operations."""
    save(root, [(step, step) for step in (OLDER, OLD, NEW)])
    plan = FaultPlan(*faults)
    prune(FaultStore(root, plan), RetentionPolicy(last=1))
    return [operation.verb for operation in plan.operations if operation.verb in MUTATING]


def run_save(open_root: Opener, name: str, scenario: str, *faults: Fault) -> tuple[int, Any]:
    """Make what a scenario begins with, save under faults; return that process's exit code and operations."""
    if scenario == PRUNING:
        return in_child(lambda: prune_two(open_root(name), *faults))
    if scenario == AFTER_OWN:
        return in_child(lambda: save_twice(open_root(name), *faults))
    if scenario in (OVER_DEAD, OVER_WHOLE):
        dead = Fault("crash", verbs=("flush",) if scenario == OVER_DEAD else ("create",))
        code, _ = in_child(lambda: save(open_root(name), [(OLD, OLD), (AGAIN, NEW)], dead))
        if code != -signal.SIGKILL:
            raise AssertionError(f"the dead attempt ended with {code}")
    begin = [(OLDER, OLDER), (OLD, OLD)] if scenario == OVER_TWO else []
    if scenario == FAILING:
        faults = (Fault("fail", verbs=("commit",)), *faults)
    return in_child(lambda: save(open_root(name), [*begin, (NEW, NEW)], *faults))


def look(root: Store, scenario: str, states: Bits) -> dict[str, Any]:
    """Restore what is there, every one of it, and save on.

    Returns:
        What was restored first, seed and step or ``"fresh"``, and in words what is wrong.
    """
    trouble = []
    job = LargerJob(root, seed=99, step=0)
    before = job.bits()
    report = job.manager.restore(allow_torn=True)
    bits = job.bits()
    restored = next((key for key, its in states.items() if its == bits), None)
    if report.step != (restored and restored[1]) or (report.is_fresh and bits != before):
        trouble.append(f"not the state of step {report.step}, but {restored}")
    for step in BESIDE.get(scenario, ()):
        with suppress(*([NotFoundError] if scenario == PRUNING else [])):
            job.manager.restore(step)
            if job.bits() == states[step, step]:
                continue
            trouble.append(f"step {step} has changed")
    if report.step == NEW:
        with LargerJob(root, AGAIN, NEW).manager as manager, pytest.raises(AlreadyCommittedError):
            manager.save(mode="sync")
    step = NEXT if report.step == NEW else NEW
    with LargerJob(root, AGAIN, step).manager as manager:
        manager.save(mode="sync")
    if job.manager.restore().step != step or job.bits() != states[AGAIN, step]:
        trouble.append("the next save is not restored")
    job.manager.close()
    return {"restored": "fresh" if report.is_fresh else restored, "trouble": trouble}


def clear(store: Store) -> None:
    """Delete everything: all of it at once would fill a small disk."""
    for name in store.list_files():
        store.delete(name)
    for folder in store.list_folders():
        clear(store.child(folder))


class Looker:
    """The process that looks after every crash; it serves the memory too."""

    def __init__(self, open_root: Opener, states: Bits, serve: Callable[[], None]) -> None:
        self._pipe, its_pipe = Pipe()
        self._pid = os.fork()
        if self._pid == 0:
            self._pipe.close()
            try:
                serve()
                its_pipe.send("ready")
                while True:
                    name, scenario = its_pipe.recv()
                    try:
                        found = look(open_root(name), scenario, states)
                        clear(open_root(name))
                    except Exception:
                        found = {"restored": None, "trouble": [traceback.format_exc()]}
                    its_pipe.send(found)
            except EOFError:
                os._exit(0)
            finally:
                os._exit(1)
        its_pipe.close()
        self._pipe.recv()

    def look(self, name: str, scenario: str) -> dict[str, Any]:
        """Look into the root of that name."""
        self._pipe.send((name, scenario))
        found: dict[str, Any] = self._pipe.recv()
        return found

    def end(self) -> None:
        """End the process."""
        self._pipe.close()
        os.waitpid(self._pid, 0)


def run_scenario(open_root: Opener, scenario: str, looker: Looker) -> dict[str, Any]:
    """Crash a save at each of its operations; return those, and what became of it."""
    code, operations = run_save(open_root, f"{scenario}/whole", scenario)
    if code != 0:
        raise AssertionError("a save that nothing crashes failed")
    crashes = []
    for at, moment in crash_points(operations, scenario):
        name = f"{scenario}/{at}-{moment}"
        verb = operations[at]
        if moment == "crash_halfway":
            fault = Fault(moment, nth=operations[: at + 1].count(verb), verbs=(verb,))
        else:
            fault = Fault(moment, nth=at + 1)
        code, _ = run_save(open_root, name, scenario, fault)
        found = looker.look(name, scenario)
        died = code == -signal.SIGKILL
        crashes.append({"at": at, "moment": moment, "died": died, **found})
    return {"operations": operations, "crashes": crashes}


def main() -> None:
    """Run all scenarios on all stores: below a folder, and below a URL; print what happened as JSON."""
    torch.set_num_threads(1)
    # Checkpoints that are passed over are the rule here.
    logging.getLogger("fsdp_ckpt").setLevel(logging.ERROR)
    folder, url, options = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    session, socket = make_session(), str(folder / "socket")
    states = {
        (seed, step): LargerJob(folder, seed, step).bits()
        for seed, step in ((OLDER, OLDER), (OLD, OLD), (NEW, NEW), (AGAIN, NEW), (AGAIN, NEXT))
    }
    openers: dict[str, Opener] = {
        "local": lambda name: open_store(folder / name),
        "memory": lambda name: ServedStore(socket, name),
        "s3": lambda name: open_store(
            f"{url}/{name}", session=session, default_block_size=PART_BYTES, **options
        ),
    }
    reports: dict[str, Any] = {}
    for store, open_root in openers.items():
        serve = partial(serve_store, FsspecStore("memory://served"), socket)
        looker = Looker(open_root, states, serve if store == "memory" else lambda: None)
        reports[store] = {s: run_scenario(open_root, s, looker) for s in SCENARIOS}
        looker.end()
    print(json.dumps(reports))


if __name__ == "__main__":
    main()
