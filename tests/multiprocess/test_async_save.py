"""Saves in the background, on real ranks: what is in them, who learns of a failure, how a program ends."""

from __future__ import annotations

import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_ckpt import CheckpointError, CheckpointManager, SaveOptions, TrainState
from fsdp_ckpt.options import SaveMode, WriterKind
from fsdp_ckpt.plan.image import BLOCK_BYTES
from fsdp_ckpt.snapshot.head_start import HeadStart
from fsdp_ckpt.snapshot.host_copy import stream_copy
from fsdp_ckpt.storage import shard_io
from fsdp_ckpt.storage.local import LocalStore
from fsdp_ckpt.storage.local_writer import UnnamedLocalWriter
from fsdp_ckpt.testing import run_ranks
from tests.bits import live_bits
from tests.endings import die_together
from tests.local_files import open_files

pytestmark = [pytest.mark.few_ranks, pytest.mark.slow]

# However slow the machine is: what is waited for comes.
PATIENCE_S = 250.0


class Job:
    """FSDP2 with batch statistics, an EMA of the user's own, and python objects that change in place."""

    def __init__(self, root: Any, seed: int = 0, width: int = 64, **options: Any) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, 8)
        )
        if dist.is_initialized():
            fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.ema = {"mean": torch.zeros(5), "notes": ["a"], "nested": {"n": [0]}}
        self.holder = Holder(self.ema)
        self.state = TrainState(
            model=self.model, optimizer=self.optimizer, extra={"ema": self.holder}
        )
        self.manager = CheckpointManager(
            root, self.state, timeout_s=PATIENCE_S, options=SaveOptions(**options)
        )
        self.width = width

    def forward(self) -> torch.Tensor:
        loss = self.model(torch.randn(4, self.width)).square().mean()
        loss.backward()
        return loss

    def step(self) -> None:
        self.forward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.state.progress.advance()
        self.ema["mean"] += 1
        self.ema["notes"].append(str(self.state.progress.step))
        self.ema["nested"]["n"][0] += 1

    def spoil(self) -> None:
        """Change everything that may change once the snapshot is taken, in place."""
        with torch.no_grad():
            for tensor in [*self.model.parameters(), *self.model.buffers()]:
                local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                local.fill_(77)
            for state in self.optimizer.state.values():
                for value in state.values():
                    (value.to_local() if hasattr(value, "to_local") else value).fill_(78)
        self.ema["mean"].fill_(79)
        self.ema["notes"].clear()
        self.ema["nested"]["n"][0] = -1
        self.optimizer.param_groups[0]["lr"] = 99.0
        torch.rand(3)

    def bits(self) -> dict[str, Any]:
        return live_bits(self.model, self.optimizer, progress=self.state.progress, ema=self.holder)


class Holder:
    """A part of the state that hands out what it has, not a copy."""

    def __init__(self, held: dict[str, Any]) -> None:
        self.held = held

    def state_dict(self) -> dict[str, Any]:
        return self.held

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                self.held[name].copy_(value)
            elif isinstance(value, list):
                self.held[name][:] = value
            else:
                self.held[name] = value


def spoiled(root: str, mode: SaveMode, writer: WriterKind) -> list[bool]:
    """Change values right after the snapshot; compare what is restored with what was there at the call."""
    job = Job(root, mode=mode, writer=writer, width=512)
    job.step()
    same = []
    for _ in range(3):
        job.step()
        expected = job.bits()
        handle = job.manager.save()
        if mode == "lazy":
            # Forward changes batch statistics, backward fills gradients; the copy goes on meanwhile.
            job.forward()
            job.ema["mean"].fill_(80)
            job.ema["notes"].append("late")
            job.optimizer.step()
        else:
            handle.wait_staged()
        job.spoil()
        info = handle.wait()
        assert info is not None
        again = Job(root, seed=9, width=512)
        again.manager.restore(info.step)
        same.append(again.bits() == expected)
        again.manager.close()
        job.manager.restore()
    job.manager.close()
    return same


@pytest.mark.parametrize("mode", ["async", "lazy"])
@pytest.mark.parametrize("writer", ["process", "thread"])
def test_the_snapshot_is_the_state_at_the_call(tmp_path: Path, mode: str, writer: str) -> None:
    """What changes after wait_staged, or by optimizer.step in lazy mode, never reaches the file."""
    assert run_ranks(spoiled, 2, str(tmp_path), mode, writer).values == [[True] * 3] * 2


def outcome(action: Any) -> dict[str, Any]:
    try:
        return {"result": str(action())}
    except CheckpointError as e:
        return {"type": type(e).__name__, "text": str(e), "rank": e.rank}


def manifests(root: str) -> list[str]:
    return sorted(p.parent.name for p in Path(root).rglob("manifest.json"))


def dead_writer(root: str, call: str) -> dict[str, Any]:
    """Rank 1's writer is killed in the middle of a save; the next call tells, the save after it works."""
    job = Job(root, width=256, mode="async")
    job.step()
    job.manager.save().wait()
    pid = job.manager.writer_pid
    assert pid is not None
    if dist.get_rank() == 1:
        os.kill(
            pid, signal.SIGSTOP
        )  # so that it is alive when the save begins, and does not finish it
    job.step()
    handle = job.manager.save()
    if dist.get_rank() == 1:
        os.kill(pid, signal.SIGKILL)
    job.step()
    if call == "wait":
        found = outcome(handle.wait)
    elif call == "save":
        # On rank 0 the failure may not be known yet: rank 1 knows it.
        while dist.get_rank() == 1 and not handle.done():
            time.sleep(0.01)
        found = outcome(job.manager.save)
    else:
        found = outcome(job.manager.close)
        job.manager.close()  # twice is fine, and says nothing twice
        return {**found, "committed": manifests(root)}
    info = job.manager.save().wait()
    assert info is not None
    found["then"] = info.step
    found["new_pid"] = job.manager.writer_pid != pid
    job.manager.close()
    return {**found, "committed": manifests(root)}


@pytest.mark.parametrize("call", ["wait", "save", "close"])
def test_a_dead_writer_is_every_ranks_failure(tmp_path: Path, call: str) -> None:
    """Killed with a save under way: raised by all ranks at the next call, naming rank and cause."""
    values = run_ranks(dead_writer, 2, str(tmp_path), call).values
    for rank, found in enumerate(values):
        assert found["type"] == "IncompleteWriteError"
        assert found["rank"] == 1
        assert "saving step 2" in found["text"]
        assert "rank 1" in found["text"]
        assert "SIGKILL" in found["text"]
        if call == "close":
            assert found["committed"] == ["step-000000001"]
        else:
            assert found["then"] == 3
            assert found["new_pid"] is (rank == 1)
            assert found["committed"] == ["step-000000001", "step-000000003"]


def denied(root: str) -> list[dict[str, Any]]:
    """One rank's store refuses; then it does not."""
    job = Job(root, width=256, mode="async", writer="thread")
    real, broken = LocalStore.write, threading.Event()

    def write(self: LocalStore, key: str, num_bytes: int) -> Any:
        if broken.is_set() and dist.get_rank() == 1:
            raise PermissionError(13, "Permission denied", key)
        return real(self, key, num_bytes)

    LocalStore.write = write  # type: ignore[method-assign]
    found = []
    for is_broken in (True, False):
        job.step()
        if is_broken:
            broken.set()
        handle = job.manager.save()
        found.append(outcome(handle.wait))
        broken.clear()
    LocalStore.write = real  # type: ignore[method-assign]
    job.manager.close()
    return [*found, {"committed": manifests(root)}]


def test_one_ranks_refusal_is_every_ranks_failure(tmp_path: Path) -> None:
    """Nothing is published, the error names rank and cause, and the following save works."""
    for first, second, last in run_ranks(denied, 2, str(tmp_path)).values:
        assert first["type"] == "IncompleteWriteError"
        assert "rank 1" in first["text"]
        assert "Permission denied" in first["text"]
        assert "step=2" in second["result"]
        assert last["committed"] == ["step-000000002"]


def early(root: str) -> list[dict[str, Any]]:
    """Rank 1 comes to each vote when rank 0 has copied everything while it waited."""
    store = dist.distributed_c10d._get_default_store()
    real, taken = HeadStart.copy, []

    def copy(self: HeadStart, *args: Any) -> None:
        real(self, *args)
        taken.append(self.num_entries)
        if dist.get_rank() == 0:
            store.set(f"copied {len(taken)}", "")

    HeadStart.copy = copy  # type: ignore[method-assign]
    real_name, named = UnnamedLocalWriter.name, []

    def name(self: UnnamedLocalWriter, key: str) -> None:
        real_name(self, key)
        named.append(key)

    UnnamedLocalWriter.name = name  # type: ignore[method-assign]
    job = Job(root, mode="async", writer="thread")
    found = []
    # The first save of a structure has nothing to go by; then one whose header is longer than the last one's,
    # one that is refused, and one more.
    for number, note in enumerate(["a", "b", "c" * 9000, "twice", "d"]):
        if note != "twice":
            job.step()
            job.ema["notes"].append(note)
        if number and dist.get_rank() == 1:
            store.wait([f"copied {number}"], datetime.timedelta(seconds=PATIENCE_S))
        expected = job.bits()
        if note == "twice":
            found.append({**outcome(job.manager.save), "taken": taken[-1], "named": len(named)})
            continue
        handle = job.manager.save()
        job.spoil()
        handle.wait()
        job.manager.restore()
        found.append(
            {
                "same": job.bits() == expected,
                "taken": taken[-1] if taken else None,
                "named": len(named),
            }
        )
    job.manager.close()
    assert not [path for path in open_files() if path.startswith(root)]  # nor any without a name
    return found


def digested(root: str) -> dict[str, list[int]]:
    """Save in every mode; return how many of the blocks the writer had to digest itself."""
    torch.set_num_threads(1)  # as torchrun has it
    real, lengths = shard_io.digest, []

    def digest(data: bytes | memoryview) -> str:
        lengths.append(len(data))
        return real(data)

    found = {}
    for mode in ("sync", "async", "lazy"):
        job = Job(f"{root}/{mode}", mode=mode, writer="thread", width=1024)
        # Not in one piece: torch copies it, and its blocks are not digested on the way.
        job.ema["mean"] = torch.zeros(2, 70_000).t()
        found[mode] = []
        for _ in range(2):
            job.step()
            expected = job.bits()
            shard_io.digest = digest
            handle = job.manager.save()
            handle.wait_staged()
            job.spoil()
            handle.wait()
            shard_io.digest = real
            found[mode].append(lengths.count(BLOCK_BYTES))
            lengths.clear()
            job.manager.restore()
            assert job.bits() == expected
        job.manager.close()
    return found


def test_the_copy_takes_the_digests_where_training_stands_still(tmp_path: Path) -> None:
    """All that it can: those of memory in one piece. Beside training, and of the rest, the writer does."""
    assert stream_copy is not None or shutil.which("cc") is None, "the extension was not built"
    ranks = run_ranks(digested, 2, str(tmp_path)).values
    for found in ranks:
        num_odd, all_of_them = found["async"][0], found["lazy"][0]
        assert all_of_them > 20
        assert found == {"sync": [num_odd] * 2, "async": [num_odd] * 2, "lazy": [all_of_them] * 2}
    if stream_copy is not None:  # one rank has the odd one, 560,000 bytes
        num_odd, another = sorted(found["async"][0] for found in ranks)
        assert num_odd == 0
        assert 2 <= another <= 4


def test_copying_begins_before_all_ranks_have_agreed(tmp_path: Path) -> None:
    """Whatever they agree on then, what is saved is what was there at the call."""
    first, second = run_ranks(early, 2, str(tmp_path)).values
    for found in (first, second):
        assert [f.get("same", f.get("type")) for f in found] == [
            True, True, True, "AlreadyCommittedError", True,
        ]  # fmt: skip
    assert first[0]["taken"] is None
    assert len({f["taken"] for f in first[1:]}) == 1
    assert first[1]["taken"] > 5
    # The file that was begun early is the one that is named, unless nothing was expected, or another header:
    # the notes are in rank 0's.
    assert [f["named"] for f in first] == [0, 1, 1, 1, 2]
    assert [f["named"] for f in second] == [0, 1, 2, 2, 3]


def slow_storage(root: str, on_busy: str) -> dict[str, Any]:
    """Thirty saves back to back, beside all-reduces; rank 1's storage is stuck in its first file.

    Where saves are skipped, until the last one was asked for; where they wait, until the second one was.
    """
    release, num_free = threading.Event(), {"skip": 30, "wait": 2}[on_busy]
    if dist.get_rank() == 1:
        real = LocalStore.write

        def write(self: LocalStore, key: str, num_bytes: int) -> Any:
            assert release.wait(PATIENCE_S)
            return real(self, key, num_bytes)

        LocalStore.write = write  # type: ignore[method-assign]
    job = Job(root, mode="async", writer="thread", on_busy=on_busy, max_in_flight=2)
    handles = []
    total = torch.zeros(())
    for number in range(1, 31):
        job.step()
        dist.all_reduce(total)
        handles.append(job.manager.save())
        if number == num_free:
            release.set()
    job.manager.close()
    infos = [handle.wait() for handle in handles]
    return {
        "skipped": [handle.is_skipped for handle in handles],
        "committed": [info.step for info in infos if info],
        "on_storage": len(manifests(root)),
    }


def test_a_slow_rank_holds_no_one_up(tmp_path: Path) -> None:
    """No deadlock with the training's collectives, no step waits for another rank's storage."""
    # That all thirty steps were made at all: rank 1's storage went on only then.
    for found in run_ranks(slow_storage, 2, str(tmp_path), "skip", timeout_s=PATIENCE_S).values:
        assert found["skipped"] == [False] * 2 + [True] * 28
        assert found["committed"] == [1, 2]
        assert found["on_storage"] == 2


def test_thirty_saves_back_to_back_are_thirty_checkpoints(tmp_path: Path) -> None:
    """Where saves wait for an image, each of them is committed, in order."""
    for found in run_ranks(slow_storage, 2, str(tmp_path), "wait").values:
        assert found["committed"] == list(range(1, 31))
        assert found["on_storage"] == 30


def busy(root: str) -> dict[str, Any]:
    """Only rank 1 has no image to spare: however fast rank 0 writes, it has a second one."""
    release = threading.Event()
    max_in_flight = 2 - dist.get_rank()
    if dist.get_rank() == 1:
        real = LocalStore.write

        def write(self: LocalStore, key: str, num_bytes: int) -> Any:
            assert release.wait(PATIENCE_S)
            return real(self, key, num_bytes)

        LocalStore.write = write  # type: ignore[method-assign]
    job = Job(root, mode="async", writer="thread", on_busy="error", max_in_flight=max_in_flight)
    job.step()
    handle = job.manager.save()
    job.step()
    dist.barrier()
    found = outcome(job.manager.save)
    release.set()
    handle.wait()
    info = job.manager.save().wait()
    assert info is not None
    job.manager.close()
    return {**found, "then": info.step}


def test_a_busy_rank_is_an_error_on_all_where_asked(tmp_path: Path) -> None:
    """The same answer on the rank that has an image to spare; nothing of the save is written."""
    for found in run_ranks(busy, 2, str(tmp_path)).values:
        assert found["type"] == "IncompleteWriteError"
        assert "rank 1" in found["text"]
        assert "max_in_flight" in found["text"]
        assert found["then"] == 2


ENDINGS = {"return": 0, "exit": 3, "exception": 1}  # and their exit codes
WRITERS = ("process", "thread")
# Loads torch once, and what the first optimizer loads; each child goes on below the loop as a program of
# its own, to the interpreter's end. That takes no second of collecting what torch has loaded: it is frozen.
PROGRAMS = """
import gc, json, os, sys
import torch._dynamo
from tests.multiprocess.test_async_save import ENDINGS, WRITERS, Job

folder, codes = sys.argv[1], {}
gc.freeze()
for name in [f"{ending}-{writer}" for ending in ENDINGS for writer in WRITERS]:
    pid = os.fork()
    if pid == 0:
        break
    codes[name] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
else:
    print(json.dumps(codes))
    sys.exit()

ending, writer = name.split("-")
errors = os.open(f"{folder}/{name}.log", os.O_WRONLY | os.O_CREAT)
os.dup2(errors, 1)
os.dup2(errors, 2)
job = Job(f"{folder}/{name}", width=1024, mode="lazy", writer=writer)
job.step()
job.manager.save()
if ending == "exit":
    sys.exit(3)
if ending == "exception":
    raise ValueError("mine")
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    """The folder of what programs with every ending have left, and their exit codes."""
    folder = tmp_path_factory.mktemp("programs")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAMS, folder],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=True,
    )
    return folder, json.loads(done.stdout)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_program_may_end_right_after_a_save(
    programs: tuple[Path, dict[str, int]], ending: str, writer: str
) -> None:
    """Without close: the save is committed, and the program ends as it wanted to."""
    folder, codes = programs
    name = f"{ending}-{writer}"
    told = (folder / f"{name}.log").read_text()
    assert codes[name] == ENDINGS[ending], told
    assert ("ValueError: mine" in told) == (ending == "exception")
    assert manifests(str(folder / name)) == ["step-000000001"]


def test_a_program_that_ends_tells_of_a_save_that_failed(tmp_path: Path) -> None:
    """Without close: the failure is on standard error."""
    program = """
        import os, signal, sys
        from tests.multiprocess.test_async_save import Job
        job = Job(sys.argv[1], mode="async")
        job.step()
        job.manager.save().wait()
        os.kill(job.manager.writer_pid, signal.SIGSTOP)
        job.step()
        job.manager.save()
        os.kill(job.manager.writer_pid, signal.SIGKILL)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), tmp_path],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert "saving step 2 failed, nothing was committed: rank 0: the writer process" in done.stderr
    assert manifests(str(tmp_path)) == ["step-000000001"]


def dying(root: str) -> None:
    """All ranks die while their writers have the snapshot and are not through with it."""
    job = Job(root, width=256, mode="async")
    job.step()
    job.manager.save().wait()
    assert job.manager.writer_pid is not None
    os.kill(job.manager.writer_pid, signal.SIGSTOP)
    Path(root, f"writer-{dist.get_rank()}").write_text(str(job.manager.writer_pid))
    job.step()
    Path(root, f"bits-{dist.get_rank()}").write_text(repr(job.bits()))
    job.manager.save()
    die_together(f"{root}.dies")


def resumed(root: str) -> dict[str, Any]:
    job = Job(root, seed=5, width=256)
    report = job.manager.restore()
    expected = Path(root, f"bits-{dist.get_rank()}").read_text()
    job.manager.close()
    return {"step": report.step, "same": repr(job.bits()) == expected}


def test_writers_finish_what_they_have_when_all_ranks_die(tmp_path: Path) -> None:
    """SIGKILL of every trainer after the snapshot: the next start finds the files, publishes and resumes."""
    run_ranks(dying, 2, str(tmp_path), check=False)
    assert manifests(str(tmp_path)) == ["step-000000001"]
    pids = [int((tmp_path / f"writer-{rank}").read_text()) for rank in range(2)]
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    deadline = time.monotonic() + PATIENCE_S
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, "a writer did not end by itself"
        time.sleep(0.02)
    assert len(list((tmp_path / "step-000000002").rglob("*.safetensors"))) == 2
    for found in run_ranks(resumed, 2, str(tmp_path)).values:
        assert found == {"step": 2, "same": True}


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
