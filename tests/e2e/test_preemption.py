"""A run that is told to end leaves one committed checkpoint of one step, whenever it is told."""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_ckpt import CheckpointManager, SaveOptions, SavePolicy, TrainState
from fsdp_ckpt.life.stepping import MAX_LOOK_STEPS
from fsdp_ckpt.storage.local import LocalStore
from fsdp_ckpt.testing import Fault, FaultPlan, FaultStore, run_ranks

pytestmark = pytest.mark.few_ranks

NUM_RANKS, NUM_LIVES = 2, 10
PHASES = ("before backward", "before the update", "before the look", "in a save", "after a save")


class Alarm:
    """A part of the state that may be asked for it while a signal comes."""

    def __init__(self) -> None:
        self.rings = False

    def state_dict(self) -> dict[str, int]:
        if self.rings:
            signal.raise_signal(signal.SIGTERM)
        return {"calls": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


class Job:
    """A sharded layer; every third step is saved in the background."""

    def __init__(self, root: Any, writer: Literal["process", "thread"] = "thread") -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(64, 64)
        if dist.is_initialized():
            fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.alarm = Alarm()
        self.state = TrainState(
            model=self.model, optimizer=self.optimizer, extra={"alarm": self.alarm}
        )
        self.manager = CheckpointManager(
            root,
            self.state,
            save=SavePolicy(every_steps=3),
            options=SaveOptions(writer=writer),
            timeout_s=250,
        )

    def run(self, at_step: int, phase: str, *, twice: bool = False) -> None:
        """Train until the manager says to stop; be told in ``phase`` of the step, never with ``phase`` ''."""

        def now(this: str) -> None:
            if this == phase and self.state.progress.step == at_step:
                for _ in range(2 if twice else 1):
                    os.kill(os.getpid(), signal.SIGTERM)

        while not self.manager.should_stop:
            loss = self.model(torch.ones(2, 64)).square().mean()
            now("before backward")
            loss.backward()
            now("before the update")
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.state.progress.advance()
            now("before the look")
            self.alarm.rings = phase == "in a save" and self.state.progress.step == at_step
            outcome = self.manager.after_step()
            self.alarm.rings = False
            if outcome.saved is not None:
                now("after a save")


def moments() -> list[tuple[int, int, str]]:
    """Return (rank, steps from the start, phase) of each life, at random; saves are under way in some."""
    chance = random.Random(20)
    found = []
    for phase in (*PHASES, *PHASES):
        steps = chance.randrange(2, 12)
        # A phase of a save needs one: steps are saved by multiples of 3.
        found.append((chance.randrange(NUM_RANKS), steps, phase))
    chance.shuffle(found)
    return found


def lives(root: str) -> list[dict[str, Any]]:
    """Ten lives of one run, one after the other."""
    found = []
    before = signal.getsignal(signal.SIGTERM)
    for number, (rank, num_steps, phase) in enumerate(moments()):
        job = Job(root, "process" if number % 3 == 1 else "thread")
        report = job.manager.restore()
        at_step = (report.step or 0) + num_steps
        if "save" in phase:
            at_step += -at_step % 3
        is_told = rank == dist.get_rank()
        job.run(at_step, phase if is_told else "", twice=number % 2 == 0)
        job.manager.close()
        found.append(
            {
                "restored": report.step,
                "stopped": job.state.progress.step,
                "at_step": at_step,
                "newest": max(step for step in steps_of(root)),
                "exit code": job.manager.exit_code,
                "again": job.manager.should_stop,
                "handler": signal.getsignal(signal.SIGTERM) == before,
            }
        )
    return found


def steps_of(root: str) -> list[int]:
    return [
        int(name.removeprefix("step-"))
        for name in LocalStore(root).list_folders()
        if (Path(root) / name / "manifest.json").exists()
    ]


def test_ten_signals_at_random_moments(tmp_path: Path) -> None:
    """To one rank, in saves too: all ranks end at the same step, which is committed, and go on from there."""
    per_rank = run_ranks(lives, NUM_RANKS, str(tmp_path)).values
    assert len(per_rank[0]) == NUM_LIVES
    ended = None
    for number, (life, other) in enumerate(zip(*per_rank, strict=True)):
        rank, _, phase = moments()[number]
        assert life["restored"] == ended
        ended = life["stopped"]
        # The clock says when the next look is; however fast steps are, it is not further away.
        assert 0 <= ended - life["at_step"] <= MAX_LOOK_STEPS
        assert other["stopped"] == ended
        assert life["newest"] == other["newest"] == ended
        assert life["exit code"] == other["exit code"] == os.EX_TEMPFAIL
        assert life["handler"]
        assert other["handler"]
        print(f"{number}: rank {rank}, {phase}, step {life['at_step']}: ended at {ended}")


def program(root: str) -> None:
    """A whole program: told to end by one rank, it ends with the manager's exit code."""
    job = Job(root)
    with job.manager as manager:
        manager.restore()
        job.run(4, "before the look" if dist.get_rank() == 1 else "")
    sys.exit(manager.exit_code)


def test_the_program_ends_with_75(tmp_path: Path) -> None:
    """What was told to end says so to its launcher, on every rank."""
    results = run_ranks(program, NUM_RANKS, str(tmp_path), check=False)
    assert [result.exit_code for result in results] == [os.EX_TEMPFAIL] * NUM_RANKS


# --- one process ---


def test_a_save_of_this_step_is_the_checkpoint(tmp_path: Path) -> None:
    """Told to end when the step has just been saved: that save is finished, and no other is made."""
    job = Job(str(tmp_path))
    with job.manager as manager:
        job.run(3, "after a save")
        assert job.state.progress.step == 4
    job = Job(str(tmp_path))
    with job.manager as manager:
        manager.restore()
        job.state.progress.advance(steps=2)
        signal.raise_signal(signal.SIGTERM)
        manager.save()
        outcome = manager.after_step()
        assert (outcome.saved, outcome.should_stop) == (None, True)
        assert manager.latest().step == 6  # type: ignore[union-attr]
        assert manager.after_step().should_stop
    assert sorted(steps_of(str(tmp_path))) == [3, 4, 6]


def test_a_notice_is_as_good_as_a_signal(tmp_path: Path) -> None:
    """What a cloud's metadata server says reaches the loop the same way."""
    job = Job(str(tmp_path))
    with job.manager as manager:
        manager.notice_preemption()
        job.run(0, "")
        assert manager.exit_code == os.EX_TEMPFAIL
        assert manager.latest().step == job.state.progress.step == 1  # type: ignore[union-attr]


def test_a_failed_save_does_not_keep_the_last_one_from_being_made(tmp_path: Path) -> None:
    """An earlier save has failed, and no call has said so yet: the checkpoint of the end is committed."""
    with FaultPlan(Fault("fail", verbs=("write",), key="step-000000003/*", count=1)) as plan:
        job = Job(FaultStore(LocalStore(str(tmp_path)), plan))
        with job.manager as manager:
            job.state.progress.advance(steps=3)
            manager.save()
            job.state.progress.advance()
            signal.raise_signal(signal.SIGTERM)
            assert manager.after_step().should_stop
            assert manager.latest().step == 4  # type: ignore[union-attr]


def test_handlers_are_put_back(tmp_path: Path) -> None:
    """Those of the program, whatever they were, and also after an error; one set meanwhile stays."""

    def mine(number: int, frame: Any) -> None:
        raise AssertionError("not called while a manager listens")

    previous = signal.signal(signal.SIGUSR1, mine)
    try:
        job = Job(str(tmp_path))
        assert signal.getsignal(signal.SIGUSR1) is not mine
        signal.raise_signal(signal.SIGUSR1)
        job.manager.__exit__(KeyError, KeyError(), None)
        assert signal.getsignal(signal.SIGUSR1) is mine
        with Job(str(tmp_path)).manager:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_without_a_save_policy_signals_are_left_alone(tmp_path: Path) -> None:
    """A manager that only saves when asked changes nothing of the process."""
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    with CheckpointManager(tmp_path, TrainState(model=nn.Linear(2, 2))) as manager:
        assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1)] == before
        assert not manager.after_step().must_break
