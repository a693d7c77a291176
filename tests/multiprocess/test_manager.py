"""What ranks promise each other: own state comes back to its owner, and all fail together or not at all."""

from __future__ import annotations

import errno
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fsdp_ckpt import (
    CheckpointError,
    CheckpointManager,
    CorruptCheckpointError,
    IncompleteWriteError,
    MismatchError,
    RankLocal,
    TrainState,
    UnencodableStateError,
)
from fsdp_ckpt.storage import local
from fsdp_ckpt.testing import run_ranks
from tests.jobs import Job, digest


class Holder:
    """A stateful part that holds anything."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def outcome(action: Any) -> dict[str, Any]:
    """Return the error of our tree that an action raises, as plain data."""
    with pytest.raises(CheckpointError) as caught:
        action()
    error = caught.value
    assert "\n" not in str(error)
    return {
        "type": type(error).__name__,
        "text": str(error),
        "rank": error.rank,
        "step": error.step,
    }


def tree(root: str) -> list[str]:
    """Return every file below a folder."""
    return sorted(str(p.relative_to(root)) for p in Path(root).rglob("*") if p.is_file())


# --- what is a rank's own ---


def own_state(root: str) -> dict[str, Any]:
    rank = dist.get_rank()
    parts = {
        "equal": Holder({"a": 1, "t": torch.arange(4)}),
        "differs": Holder({"cursor": 10 * rank, "t": torch.full((rank,), rank), "same": "x"}),
        "declared": Holder(RankLocal({"seen": [rank], "t": torch.empty(rank % 2, 2)})),
        "partly": Holder({"even": rank // 2}),
    }
    data = Holder({"position": 100 + rank})
    state = TrainState(data=data, extra=parts)
    torch.manual_seed(rank)
    with CheckpointManager(root, state, timeout_s=250) as manager:
        manager.save(mode="sync")
        drawn = torch.rand(3)
        for part in (*parts.values(), data):
            part.state = {}
        manager.restore(0)
        again = torch.rand(3)
    differs = parts["differs"].state
    return {
        "equal": parts["equal"].state["a"] == 1
        and parts["equal"].state["t"].tolist() == [0, 1, 2, 3],
        "cursor": differs["cursor"],
        "shape": list(differs["t"].shape),
        "value": differs["t"].tolist(),
        "same": differs["same"],
        "declared": parts["declared"].state["seen"] + list(parts["declared"].state["t"].shape),
        "even": parts["partly"].state["even"],
        "position": data.state["position"],
        "random": torch.equal(drawn, again),
    }


def restored_elsewhere(root: str) -> dict[str, Any]:
    data = Holder({"position": 0})
    parts = {"partly": Holder({"even": None})}
    state = TrainState(data=data, extra=parts)
    with CheckpointManager(root, state, timeout_s=250) as manager:
        return outcome(lambda: manager.restore(0, allow_unexpected=["extra.*"]))


def test_every_rank_gets_its_own_back(tmp_path: Path) -> None:
    """Values that differ per rank are never deduplicated; on another world size they are not guessed."""
    values = run_ranks(own_state, 4, str(tmp_path)).values
    for rank, value in enumerate(values):
        assert value == {
            "equal": True,
            "cursor": 10 * rank,
            "shape": [rank],
            "value": [rank] * rank,
            "same": "x",
            "declared": [rank, rank % 2, 2],
            "even": rank // 2,
            "position": 100 + rank,
            "random": True,
        }
    for value in run_ranks(restored_elsewhere, 2, str(tmp_path)).values:
        assert value["type"] == "MismatchError"
        assert "data.position" in value["text"]
        assert "allow_missing=['data']" in value["text"]


# --- all fail together ---


def damaged(root: str) -> list[dict[str, Any]]:
    job = Job(root)
    job.run(2, save_at=(1, 2))
    outcomes = []
    shard = next(p for p in tree(f"{root}/step-000000002") if "rank-00001" in p)
    path = Path(root, "step-000000002", shard)
    whole = path.read_bytes()
    for damage in ("flip", "truncate", "remove"):
        dist.barrier()
        if dist.get_rank() == 0:
            if damage == "flip":
                path.write_bytes(whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:])
            elif damage == "truncate":
                path.write_bytes(whole[:-1])
            else:
                path.unlink()
        dist.barrier()
        before = job.digests()
        found = outcome(lambda: job.manager.restore(2))
        found["untouched"] = job.digests() == before
        outcomes.append(found)
    report = job.manager.restore()
    return [*outcomes, {"step": report.step, "skipped": [s.step for s in report.skipped]}]


def test_damage_is_named_by_all_ranks(tmp_path: Path) -> None:
    """One rank's damaged shard fails the restore on all ranks, untouched; without a step they fall back."""
    for value in run_ranks(damaged, 2, str(tmp_path)).values:
        *damages, fallback = value
        for found in damages:
            assert found["type"] == "CorruptCheckpointError"
            assert found["step"] == 2
            assert found["rank"] == 1
            for part in ("step 2", "rank 1", "rank-00001-of-00002.safetensors", "model."):
                assert part in found["text"]
            assert found["untouched"]
        assert fallback == {"step": 1, "skipped": [2]}


def failing_thread(root: str) -> dict[str, Any]:
    rank = dist.get_rank()
    state = TrainState(
        extra={"big": Holder({"t": torch.ones(16 << 20, dtype=torch.uint8) * (rank + 1)})}
    )
    manager = CheckpointManager(root, state, timeout_s=250)
    manager.save(mode="sync")
    state.progress.advance()
    before = tree(root)
    real, threads = os.pwrite, set()
    together = threading.Barrier(2)  # both threads are writing before either goes on

    def full_disk(fd: int, data: Any, offset: int) -> int:
        name = threading.current_thread().name
        if name.startswith("fsdp_ckpt-io") and name not in threads:
            threads.add(name)
            together.wait(250)
        if rank == 1 and offset > 8 << 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data, offset)

    local.os.pwrite = full_disk  # type: ignore[assignment]
    try:
        found = outcome(lambda: manager.save(mode="sync"))
    finally:
        local.os.pwrite = real
    dist.barrier()
    found["threads"] = len(threads)
    found["new"] = [name for name in tree(root) if name not in before]
    dist.barrier()
    found["then"] = manager.save(mode="sync").wait().step
    found["latest"] = manager.latest().step  # type: ignore[union-attr]
    return found


def test_a_helper_threads_failure_fails_the_save_on_all_ranks(tmp_path: Path) -> None:
    """A full disk in one of several writing threads of one rank is raised by all; nothing is committed."""
    for value in run_ranks(failing_thread, 2, str(tmp_path)).values:
        assert value["type"] == "IncompleteWriteError"
        assert "rank 1" in value["text"]
        assert "No space left" in value["text"]
        assert value["threads"] > 1
        assert not any("rank-00001" in name or "manifest" in name for name in value["new"])
        assert (value["then"], value["latest"]) == (1, 1)


def lonely_trouble(root: str) -> list[dict[str, Any]]:
    """Each trouble is on rank 1 alone."""
    rank = dist.get_rank()
    outcomes = []
    holder = Holder({"callback": print if rank == 1 else None})
    manager = CheckpointManager(root, TrainState(extra={"hook": holder}), timeout_s=250)
    outcomes.append(outcome(lambda: manager.save(mode="sync")))
    mesh = init_device_mesh("cpu", (2,))
    shape = (4, 2) if rank == 0 else (4, 3)
    local_part = torch.ones(2, shape[1])
    wrong = DTensor.from_local(local_part, mesh, run_check=False)
    manager = CheckpointManager(root, TrainState(extra={"w": Holder({"t": wrong})}), timeout_s=250)
    outcomes.append(outcome(lambda: manager.save(mode="sync")))
    manager = CheckpointManager(
        root, TrainState(extra={"o": Holder(RankLocal(1) if rank == 0 else {})}), timeout_s=250
    )
    outcomes.append(outcome(lambda: manager.save(mode="sync")))
    dist.barrier()
    return [*outcomes, {"files": tree(root)}]


def test_one_ranks_bad_state_is_refused_by_all(tmp_path: Path) -> None:
    """What cannot be saved on one rank is an error on every rank before anything is written."""
    for value in run_ranks(lonely_trouble, 2, str(tmp_path)).values:
        bad_value, bad_shape, bad_own, files = value
        assert bad_value["type"] == "UnencodableStateError"
        assert "extra.hook.callback" in bad_value["text"]
        assert bad_value["rank"] == 1
        assert bad_shape["type"] == "MismatchError"
        assert "extra.w.t" in bad_shape["text"]
        assert bad_own["type"] == "MismatchError"
        assert "extra.o" in bad_own["text"]
        assert files["files"] == []


def dies_in_save(root: str) -> None:
    job = Job(root)
    job.run(2, save_at=(1,))
    real = os.fsync

    def die(fd: int) -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        real(fd)

    local.os.fsync = die  # type: ignore[assignment]
    job.manager.save(mode="sync")


def saves_again(root: str) -> dict[str, Any]:
    job = Job(root, seed=4)
    report = job.manager.restore()
    job.run(2, save_at=(2,))
    digests = job.full_digests()
    job = Job(root, seed=5)
    return {
        "restored": report.step,
        "attempts": len(list(Path(root, "step-000000002").iterdir())) - 1,
        "again": job.manager.restore().step,
        "equal": job.full_digests() == digests,
    }


def test_a_dead_attempt_never_mixes_with_the_next(tmp_path: Path) -> None:
    """A rank killed in a save leaves the checkpoint before; the step is saved again on another world size."""
    killed = run_ranks(dies_in_save, 3, str(tmp_path), check=False, grace_s=2)
    assert killed[1].exit_code == -signal.SIGKILL
    for value in run_ranks(saves_again, 2, str(tmp_path)).values:
        assert value == {"restored": 1, "attempts": 2, "again": 2, "equal": True}


# --- unusual training states under FSDP2 ---


class Master(torch.optim.Optimizer):
    """Adam-like, for bf16 parameters: fp32 moments and a separate fp32 master."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["master"] = p.detach().to(torch.float32).clone()
                    state["exp_avg"] = torch.zeros_like(state["master"])
                state["step"] += 1
                state["exp_avg"].lerp_(p.grad.to(torch.float32), 0.5)
                state["master"].add_(state["exp_avg"], alpha=-group["lr"] / 3)
                p.copy_(state["master"].to(p.dtype))


def unusual(root: str, seed: int, load: bool) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.ModuleDict(
        {
            "used": nn.Linear(3, 2, dtype=torch.bfloat16),
            "frozen": nn.Linear(5, 1),
            "unused": nn.Linear(2, 2),
            "later": nn.Linear(3, 2, dtype=torch.bfloat16),
        }
    )
    model["frozen"].requires_grad_(False)
    for part in model.values():
        fully_shard(part)
    optimizer = Master([p for p in model.parameters()])
    manager = CheckpointManager(root, TrainState(model=model, optimizer=optimizer), timeout_s=250)
    if load:
        manager.restore()
    else:
        for _ in range(2):
            x = torch.ones(4, 3, dtype=torch.bfloat16)
            (model["used"](x) + model["later"](x)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        model["later"].requires_grad_(False)
        manager.save(mode="sync")
    found = {name: digest(t) for name, t in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in sorted(optimizer.state[parameter].items()):
            found[f"{name}.{key}"] = (
                digest(value) if isinstance(value, torch.Tensor) else repr(value)
            )
    return found


def test_unusual_states_lose_nothing(tmp_path: Path) -> None:
    """bf16 with fp32 moments and master, frozen, unused and later frozen parameters come back to the bit."""
    saved = run_ranks(unusual, 4, str(tmp_path), 0, False).values
    loaded = run_ranks(unusual, 4, str(tmp_path), 1, True).values
    assert loaded == saved
    assert saved[0]["used.weight.master"].startswith("torch.float32")
    assert "later.weight.exp_avg" in saved[0]
    assert "frozen.weight.exp_avg" not in saved[0]
    assert "unused.weight.exp_avg" not in saved[0]


@pytest.mark.parametrize("error", [MismatchError, CorruptCheckpointError, UnencodableStateError])
def test_verdicts_are_ours(error: type[CheckpointError]) -> None:
    """What ranks agree on is an ordinary exception."""
    assert issubclass(error, Exception)
    assert not issubclass(error, IncompleteWriteError)
