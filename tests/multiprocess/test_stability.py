"""A run that goes wrong on one rank and recovers by itself, on real ranks."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_ckpt import (
    CheckpointError,
    CheckpointManager,
    ResumableSampler,
    SaveOptions,
    SavePolicy,
    SpikePolicy,
    TrainState,
)
from fsdp_ckpt.commit.branches import DataWindow
from fsdp_ckpt.commit.catalog import CheckpointInfo, SkippedCheckpoint, find_checkpoints
from fsdp_ckpt.commit.rollback import read_history
from fsdp_ckpt.storage.local import LocalStore
from fsdp_ckpt.testing import run_ranks
from tests.endings import die_together

pytestmark = pytest.mark.few_ranks

NUM_SAMPLES, BATCH, NUM_RANKS, PEAK_LR = 400, 4, 2, 0.01
GLOBAL_BATCH = BATCH * NUM_RANKS
FIRST, STOP = 23, 32  # steps whose data spoils the loss of rank 1
SPIKES = SpikePolicy(
    window=16,
    warmup=8,
    patience=STOP - FIRST,  # so that 30 is saved before it is decided
    healthy_steps=2,
    lr_factor=0.25,
    lr_steps=4,
    max_rollbacks=2,
)
SAVES = SavePolicy(every_steps=10, last_step=40)


def scheduled(step: int) -> float:
    """What the schedule gives to step ``step``: warmup, then two milestones."""
    ratio = min(1.0, step / 8) * (0.5 if step > 22 else 1.0) * (0.5 if step > 28 else 1.0)
    return PEAK_LR * ratio


def epoch_order() -> list[int]:
    return list(ResumableSampler(NUM_SAMPLES, seed=5, rank=0, world_size=1))


class SeenAdamW(torch.optim.AdamW):
    """Records the learning rate with which each step was really made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[float] = []

    def step(self, closure: Any = None) -> Any:
        self.seen.append(self.param_groups[0]["lr"])
        return super().step(closure)


class Job:
    """A sharded model that reads one batch per step; what it reports as loss is spoilt by some samples."""

    def __init__(self, root: str, poison: range, spikes: SpikePolicy = SPIKES) -> None:
        torch.manual_seed(0)
        self.rank = dist.get_rank()
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.1), nn.Linear(6, 4))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (NUM_RANKS,)))
        self.optimizer = SeenAdamW(self.model.parameters(), lr=PEAK_LR)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda done: scheduled(done + 1) / PEAK_LR
        )
        self.sampler = ResumableSampler(NUM_SAMPLES, seed=5)
        self.state = TrainState(
            model=self.model,
            optimizer=self.optimizer,
            lr_scheduler=self.scheduler,
            data=self.sampler,
        )
        self.manager = CheckpointManager(
            root,
            self.state,
            save=SAVES,
            spikes=spikes,
            options=SaveOptions(mode="sync"),
            timeout_s=250,
        )
        order = epoch_order()
        start, stop = ((step - 1) * GLOBAL_BATCH for step in (poison.start, poison.stop))
        self.poison = set(order[start:stop])
        self.records: list[dict[str, Any]] = []

    def loss(self, ids: list[int]) -> torch.Tensor:
        features = torch.tensor(ids).float()[:, None] / NUM_SAMPLES + torch.ones(4)
        return self.model(features).square().mean()

    def shown(self, ids: list[int]) -> float:
        is_spoilt = self.rank == 1 and not self.poison.isdisjoint(ids)
        return 1.0 + 0.01 * (self.state.progress.step % 3) + (50.0 if is_spoilt else 0.0)

    def run(self, kill_at: int | None = None, log: str = "") -> None:
        """Train until it is over, or dies in the middle of step ``kill_at`` after a rollback."""
        progress, has_gone_back = self.state.progress, False
        while not self.manager.should_stop:
            for ids in self._batches():
                self.loss(ids).backward()
                if has_gone_back and progress.step + 1 == kill_at:
                    Path(f"{log}{self.rank}").write_text(json.dumps(self.records))
                    die_together(f"{log}dies")
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.scheduler.step()
                progress.advance(samples=GLOBAL_BATCH)
                record = {"step": progress.step, "ids": ids, "lr": self.optimizer.seen[-1]}
                outcome = self.manager.after_step(loss=self.shown(ids))
                self.records.append(
                    {**record, "back_to": progress.step if outcome.rolled_back else None}
                )
                has_gone_back |= outcome.rolled_back
                if outcome.must_break:
                    break

    def _batches(self) -> Any:
        ids: list[int] = []
        for index in self.sampler:
            ids.append(index)
            if len(ids) == BATCH:
                yield ids
                ids = []


def first_life(root: str, log: str) -> None:
    job = Job(root, range(FIRST, STOP))
    job.manager.restore()
    job.run(kill_at=22, log=log)


def second_life(root: str, hopeless: str) -> dict[str, Any]:
    job = Job(root, range(FIRST, STOP))
    report = job.manager.restore()
    found: dict[str, Any] = {"restored": report.step, "factor": job.manager.lr_factor}
    found["skipped"] = [(s.step, s.abandoned) for s in report.skipped]
    job.run()
    found["records"] = job.records
    job.manager.close()
    # Another run, in which every sample from step 13 on is bad.
    job = Job(
        hopeless, range(13, 51), SpikePolicy(warmup=8, patience=1, max_rollbacks=2, healthy_steps=2)
    )
    try:
        job.run()
    except CheckpointError as e:
        found["error"] = str(e)
    found["hopeless"] = [r["step"] for r in job.records]
    job.manager.close()
    return found


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Both lives of the run, and what lay on storage between them."""
    folder = tmp_path_factory.mktemp("lives")
    root, log = LocalStore(str(folder / "run")), str(folder / "records-")
    died = run_ranks(first_life, NUM_RANKS, root.url, log, check=False)
    between = list(find_checkpoints(root))
    again = run_ranks(second_life, NUM_RANKS, root.url, str(folder / "hopeless")).values
    return {
        "exit codes": [result.exit_code for result in died],
        "first": [json.loads(Path(f"{log}{rank}").read_text()) for rank in range(NUM_RANKS)],
        "between": between,
        "second": again,
        "root": root,
        "hopeless": LocalStore(str(folder / "hopeless")),
    }


def test_all_ranks_go_back_together(lives: dict[str, Any]) -> None:
    """A spike on rank 1 alone from step 23 on, saves every 10: all go back to 20, then die in step 22."""
    assert lives["exit codes"] == [-signal.SIGKILL] * NUM_RANKS
    for records in lives["first"]:
        steps = [r["step"] for r in records]
        assert steps == [*range(1, STOP), 21]
        assert [r["back_to"] for r in records if r["back_to"] is not None] == [20]
        assert records[STOP - 2]["back_to"] == 20
    (rollback,) = read_history(lives["root"]).rollbacks
    assert (rollback.from_step, rollback.to_step) == (STOP - 1, 20)
    window = DataWindow(epoch=0, start=22 * GLOBAL_BATCH, stop=31 * GLOBAL_BATCH)
    assert rollback.skip == (window,)
    assert "standard deviations above" in rollback.reason


def test_a_restart_lands_on_the_new_branch(lives: dict[str, Any]) -> None:
    """The old 30 stands there, whole and with the higher number, and is not chosen."""
    old, *rest = lives["between"]
    assert isinstance(old, SkippedCheckpoint)
    assert (old.step, old.abandoned) == (30, True)
    assert [(f.step, f.generation) for f in rest] == [(20, 0), (10, 0)]
    for life in lives["second"]:
        assert life["restored"] == 20
        assert life["factor"] == SPIKES.lr_factor
        assert life["skipped"] == [(30, True)]
        assert [r["step"] for r in life["records"]] == list(range(21, 41))
    whole = [f for f in find_checkpoints(lives["root"]) if isinstance(f, CheckpointInfo)]
    assert [(f.step, f.generation) for f in whole] == [(40, 1), (30, 1), (20, 0), (10, 0)]


def test_the_bad_data_never_comes_again(lives: dict[str, Any]) -> None:
    """After the rollback, and after the restart, every rank reads on as if the order did not hold it."""
    order = epoch_order()
    bad = set(order[22 * GLOBAL_BATCH : 31 * GLOBAL_BATCH])
    left = order[20 * GLOBAL_BATCH : 22 * GLOBAL_BATCH] + order[31 * GLOBAL_BATCH :]
    for rank in range(NUM_RANKS):
        first, second = lives["first"][rank], lives["second"][rank]["records"]
        spoilt = {i for r in first[22:31] for i in r["ids"]}
        assert spoilt <= bad
        after_rollback = [r["ids"] for r in first[31:]]
        after_restart = [r["ids"] for r in second]
        mine = left[rank::NUM_RANKS]
        batches = [mine[i : i + BATCH] for i in range(0, len(mine), BATCH)]
        assert after_rollback == batches[:1]
        assert after_restart == batches[:20]


def test_the_learning_rate_is_lowered_as_asked(lives: dict[str, Any]) -> None:
    """For four steps, in both lives; before and after them it is that of the uninterrupted schedule."""
    for rank in range(NUM_RANKS):
        records = lives["first"][rank] + lives["second"][rank]["records"]
        gone_back = False
        for record in records:
            step, lr = record["step"], scheduled(record["step"])
            is_lowered = gone_back and 20 < step <= 24
            assert record["lr"] == (lr * SPIKES.lr_factor if is_lowered else lr), record
            gone_back |= record["back_to"] is not None


def test_a_run_that_stays_bad_is_stopped(lives: dict[str, Any]) -> None:
    """Two rollbacks at one place, then an error on all ranks that says why."""
    for life in lives["second"]:
        assert life["hopeless"] == [*range(1, 14), 11, 12, 13, 11, 12]
        assert "gone back 2 times at this place" in life["error"]
        assert "step 13" in life["error"]
    assert len(read_history(lives["hopeless"]).rollbacks) == 2
