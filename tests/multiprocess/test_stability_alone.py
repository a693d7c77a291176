"""The life cycle in one process: what the loop is told, what stays, what a rollback puts back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, MultiStepLR, SequentialLR

from fsdp_ckpt import (
    CheckpointError,
    CheckpointManager,
    CorruptCheckpointError,
    IncompleteWriteError,
    MismatchError,
    NotFoundError,
    ResumableSampler,
    RetentionPolicy,
    SaveOptions,
    SavePolicy,
    SpikePolicy,
    StorageError,
    TrainState,
)
from fsdp_ckpt.commit.catalog import CheckpointInfo, find_checkpoints, step_folder
from fsdp_ckpt.commit.marks import read_marks
from fsdp_ckpt.commit.rollback import read_history, record_rollback
from fsdp_ckpt.snapshot.buffer import HostBuffer, ImagePool
from fsdp_ckpt.storage.local import LocalStore
from fsdp_ckpt.testing import Fault, FaultPlan, FaultStore
from tests.bits import live_bits

pytestmark = pytest.mark.few_ranks

BATCH, NUM_SAMPLES = 2, 120
NAN = float("nan")
EAGER = SpikePolicy(warmup=4, window=8, patience=1, healthy_steps=2, max_rollbacks=5)


class Job:
    """A run of one process; ``loss_of`` says what it reports."""

    def __init__(
        self, root: Any, loss_of: Callable[[int], float] = lambda _: 1.0, **how: Any
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = schedule(self.optimizer)
        self.sampler = ResumableSampler(NUM_SAMPLES, seed=1, rank=0, world_size=1)
        self.state = TrainState(
            model=self.model,
            optimizer=self.optimizer,
            lr_scheduler=self.scheduler,
            data=self.sampler,
        )
        how.setdefault("save", SavePolicy(every_steps=5, on_signal=False))
        how.setdefault("options", SaveOptions(mode="sync"))
        self.manager = CheckpointManager(root, self.state, timeout_s=250, **how)
        self.loss_of = loss_of
        self.lrs: list[float] = []
        self.ids: list[list[int]] = []
        self.backs: list[int] = []
        self.outcomes: list[Any] = []

    def run(self, until: int, *, only_back: bool = False) -> None:
        """Train; ``only_back``: until the run has gone back."""
        progress = self.state.progress
        while progress.step < until and not self.manager.should_stop:
            indices = iter(self.sampler)
            for ids in zip(indices, indices, strict=True):
                self.optimizer.zero_grad()
                self.model(torch.tensor(ids)[:, None] + torch.ones(4)).var().backward()
                self.lrs.append(self.optimizer.param_groups[0]["lr"])
                self.optimizer.step()
                self.scheduler.step()
                progress.advance(samples=BATCH)
                self.ids.append(list(ids))
                outcome = self.manager.after_step(loss=self.loss_of(progress.step))
                self.outcomes.append(outcome)
                if outcome.rolled_back:
                    self.backs.append(progress.step)
                    if only_back:
                        return
                if outcome.must_break or progress.step >= until:
                    break
            else:
                progress.next_epoch()

    def settle(self) -> None:
        """Wait for what is done behind training after a commit."""
        self.manager._saver.finish()
        self.manager._life._keeper.finish()

    def bits(self) -> Any:
        return live_bits(self.model, self.optimizer, progress=self.state.progress)


def schedule(optimizer: torch.optim.Optimizer) -> Any:
    """Return warmup, milestones and a cosine, one after the other; the last goes by the current value."""
    parts = [
        LinearLR(optimizer, 0.1, total_iters=10),
        MultiStepLR(optimizer, [4, 8], gamma=0.5),
        CosineAnnealingLR(optimizer, 12, eta_min=1e-4),
    ]
    return SequentialLR(optimizer, parts, [10, 22])


def once(*steps: int, value: float = NAN) -> Callable[[int], float]:
    """Return a loss that is bad the first time that it comes to each of the steps."""
    left = set(steps)

    def loss_of(step: int) -> float:
        if step in left:
            left.discard(step)
            return value
        return 1.0

    return loss_of


# --- learning rate, state and data ---


def test_the_learning_rate_follows_the_schedule(tmp_path: Path) -> None:
    """After resumes and rollbacks in warmup, at milestones, in the cosine: that of the uninterrupted run."""
    plain = Job(tmp_path / "plain")
    plain.run(34)
    bad = (8, 18, 28)
    job = Job(tmp_path / "run", once(*bad), spikes=EAGER)
    job.run(12)
    for until in (19, 34):
        job.manager.close()
        resumed = Job(tmp_path / "run", once(*bad), spikes=EAGER)
        resumed.loss_of = job.loss_of
        resumed.lrs, resumed.backs = job.lrs, job.backs
        job = resumed
        start = job.manager.restore().step
        assert start is not None
        # What was trained after the last save is trained again.
        steps_done = len(job.lrs)
        job.run(until)
        assert job.lrs[steps_done:][:2] == plain.lrs[start : start + 2]
    assert job.backs == [5, 15, 25]
    parts = [(0, 8), (5, 12), (10, 18), (15, 19), (15, 28), (25, 34)]
    expected = [done for start, stop in parts for done in range(start, stop)]
    assert job.lrs == [plain.lrs[done] for done in expected]
    job.manager.close()
    plain.manager.close()


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_lowered_rate_ends_exactly(tmp_path: Path, as_tensor: bool) -> None:
    """The schedule never sees it, no checkpoint holds it, and it ends after as many steps as asked."""

    class Seen(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append(float(self.param_groups[0]["lr"]))
            return super().step(closure)

    seen: list[float] = []
    model = nn.Linear(2, 1)
    lr: Any = torch.tensor(0.5) if as_tensor else 0.5
    optimizer = Seen(model.parameters(), lr=lr)
    policy = SpikePolicy(on_spike="lower_lr", lr_factor=0.25, lr_steps=3, patience=1)
    state = TrainState(model=model, optimizer=optimizer)
    bad = once(2)
    root = tmp_path / "run"

    def steps(manager: CheckpointManager, num: int) -> None:
        for _ in range(num):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            state.progress.advance()
            manager.after_step(loss=bad(state.progress.step))
            assert float(optimizer.param_groups[0]["lr"]) == 0.5

    policies = {"save": SavePolicy(every_steps=3, on_signal=False), "spikes": policy}
    with CheckpointManager(root, state, options=SaveOptions(mode="sync"), **policies) as manager:  # type: ignore[arg-type]
        steps(manager, 3)
    with CheckpointManager(root, state, options=SaveOptions(mode="sync"), **policies) as manager:  # type: ignore[arg-type]
        assert manager.restore().step == 3
        assert manager.lr_factor == 0.25
        steps(manager, 4)
    assert seen == [0.5, 0.5, 0.125, 0.125, 0.125, 0.5, 0.5]


def test_a_rollback_puts_everything_back(tmp_path: Path) -> None:
    """Model, moments, schedule, random states, progress are to the bit what they were; data goes on later."""
    seen = {}
    job = Job(tmp_path, once(8), spikes=EAGER)
    job.run(5)
    seen["saved"] = job.bits()
    job.run(8, only_back=True)
    assert job.backs == [5]
    assert job.bits() == seen["saved"]
    assert all(p.grad is None for p in job.model.parameters())
    job.run(6)
    order = list(ResumableSampler(NUM_SAMPLES, seed=1, rank=0, world_size=1))
    # Step 8 read positions 14 and 15: left out from then on.
    assert job.ids[8] == order[10:12]
    job.run(9)
    assert job.ids[9:12] == [order[12:14], order[16:18], order[18:20]]
    job.manager.close()


def test_a_spike_of_several_steps_at_a_look(tmp_path: Path) -> None:
    """With looks every 4 steps all are judged, and the window is that of the step that was bad."""
    policy = SpikePolicy(
        warmup=4, window=8, patience=1, healthy_steps=2, look_every=4, skip_before=1, skip_after=2
    )
    job = Job(tmp_path, once(10), spikes=policy, save=SavePolicy(every_steps=4, on_signal=False))
    job.run(12)
    assert job.backs == [4]
    (rollback,) = read_history(LocalStore(str(tmp_path))).rollbacks
    assert (rollback.from_step, rollback.to_step) == (12, 4)
    assert [(w.epoch, w.start, w.stop) for w in rollback.skip] == [(0, 16, 24)]
    job.manager.close()


def test_data_that_is_yet_to_be_read_can_be_skipped(tmp_path: Path) -> None:
    """Also over the end of the epoch, as far as it goes."""
    policy = SpikePolicy(warmup=4, window=8, patience=1, healthy_steps=2, skip_after=100)
    job = Job(tmp_path, once(58), spikes=policy)
    job.run(58)
    (rollback,) = read_history(LocalStore(str(tmp_path))).rollbacks
    assert [(w.epoch, w.start, w.stop) for w in rollback.skip] == [(0, 114, 120)]
    job.run(58)  # the epoch has 57 steps now
    assert (job.state.progress.epoch, job.sampler.cursor) == (1, 2)
    job.manager.close()


# --- going back ---


def test_nowhere_to_go_back_to(tmp_path: Path) -> None:
    """A spike before the first save is an error that says so, and nothing is recorded."""
    job = Job(tmp_path, once(3), spikes=EAGER)
    with pytest.raises(NotFoundError, match="no checkpoint to go back to from step 3"):
        job.run(5)
    assert read_history(LocalStore(str(tmp_path))).rollbacks == ()
    job.manager.close()


def test_a_crash_right_after_the_record(tmp_path: Path) -> None:
    """On record, and nothing restored yet: a restart comes to the new branch, with its skip in force."""
    root = LocalStore(str(tmp_path))
    with FaultPlan(Fault("fail", verbs=("read_into",), key="step-000000005/*", count=None)) as plan:
        job = Job(FaultStore(root, plan), once(12), spikes=EAGER)
        job.run(11)
        (tmp_path / step_folder(10) / "manifest.json").write_bytes(b"torn")
        before = job.bits()
        with pytest.raises(StorageError):
            job.run(12)
        assert job.bits()["random"] != before["random"]  # step 12 was trained, and is what is there
        assert job.state.progress.step == 12
    job = Job(tmp_path, spikes=EAGER)
    assert job.manager.restore().step == 5
    job.run(12)
    order = list(ResumableSampler(NUM_SAMPLES, seed=1, rank=0, world_size=1))
    assert [i for ids in job.ids for i in ids] == [*order[10:22], *order[24:26]]
    assert [(f.step, f.generation) for f in whole(root)] == [(10, 1), (5, 0)]
    job.manager.close()


@pytest.mark.parametrize(
    "options",
    [
        SaveOptions(mode="sync"),
        SaveOptions(mode="async", writer="process"),
        SaveOptions(mode="lazy", writer="thread", max_in_flight=2),
    ],
    ids=["sync", "async", "lazy"],
)
def test_what_is_still_in_host_memory_is_not_read(tmp_path: Path, options: SaveOptions) -> None:
    """The snapshot comes back to the bit, though its file on storage is not what was written."""
    job = Job(tmp_path, once(13), spikes=EAGER, options=options)
    job.run(10)
    saved = job.bits()
    job.outcomes[-1].saved.wait()
    job.run(12)
    damage(tmp_path, 10)
    job.run(13, only_back=True)
    assert job.backs == [10]
    assert job.bits() == saved
    # The memory has what the run left behind now: going back once more reads, and finds the damage.
    job.loss_of = once(12)
    job.run(12, only_back=True)
    assert job.backs == [10, 5]
    job.manager.close()


def test_memory_that_is_not_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A bit that fell over in host memory is no damage of the checkpoint: that block is read."""
    job = Job(tmp_path, once(13), spikes=EAGER)
    job.run(10)
    saved = job.bits()
    real = ImagePool.take_holding

    def take(self: ImagePool, name: str) -> HostBuffer | None:
        buffer = real(self, name)
        assert buffer is not None
        buffer.memory[-4096:] = bytes(4096)
        return buffer

    monkeypatch.setattr(ImagePool, "take_holding", take)
    job.run(13, only_back=True)
    assert job.backs == [10]
    assert job.bits() == saved
    assert "bytes of it from host memory" in caplog.text
    job.manager.close()


def test_a_damaged_target_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The good checkpoint turns out to be damaged: the one before it is taken, each on record."""
    job = Job(tmp_path, spikes=EAGER)
    job.run(10)
    job.manager.close()
    job = Job(tmp_path, once(13), spikes=EAGER)  # which has no snapshot in memory
    job.manager.restore()
    job.run(12)
    damage(tmp_path, 10)
    job.run(13, only_back=True)
    assert job.backs == [5]
    assert "could not go back to step 10" in caplog.text
    root = LocalStore(str(tmp_path))
    assert [r.to_step for r in read_history(root).rollbacks] == [10, 5]
    assert "corrupt" in kinds(root, 10)
    job.run(16)
    assert [(f.step, f.generation) for f in whole(root)] == [(15, 2), (10, 2), (5, 0)]
    job.manager.close()


def test_going_on_from_an_older_step_is_a_rollback(tmp_path: Path) -> None:
    """Asked for by step, it is recorded before the first save; what lay beyond is left, and replaced."""
    job = Job(tmp_path)
    job.run(16)
    job.manager.close()
    root = LocalStore(str(tmp_path))
    job = Job(tmp_path)
    assert job.manager.restore(5).step == 5
    assert read_history(root).rollbacks == ()  # it may only want to look
    job.run(10)
    (rollback,) = read_history(root).rollbacks
    assert (rollback.from_step, rollback.to_step, rollback.skip) == (10, 5, ())
    job.manager.close()
    job = Job(tmp_path)
    report = job.manager.restore()
    assert (report.step, [s.step for s in report.skipped]) == (10, [15])
    job.run(15)
    assert [(f.step, f.generation) for f in whole(root)] == [(15, 1), (10, 1), (5, 0)]
    job.manager.close()


def test_a_restart_does_not_publish_what_was_left(tmp_path: Path) -> None:
    """A complete attempt of the branch that was left, without a manifest, stays unpublished."""
    job = Job(tmp_path, once(12), spikes=EAGER)
    job.run(11)
    (tmp_path / step_folder(10) / "manifest.json").unlink()
    job.run(12, only_back=True)
    assert job.backs == [5]
    job.manager.close()
    job = Job(tmp_path)
    report = job.manager.restore()
    assert (report.step, [s.step for s in report.skipped]) == (5, [10])
    assert read_history(LocalStore(str(tmp_path))).generation == 1
    job.manager.close()


def test_a_save_of_the_branch_that_was_left_is_not_published(tmp_path: Path) -> None:
    """Another process has gone back meanwhile: the save fails, with nothing committed."""
    job = Job(tmp_path, save=SavePolicy(on_signal=False))
    job.run(3)
    job.manager.save()
    root = LocalStore(str(tmp_path))
    record_rollback(root, read_history(root), from_step=9, to_step=3, attempt="x", reason="by hand")
    job.run(5)
    with pytest.raises(IncompleteWriteError, match="it went back since"):
        job.manager.save()
    job.manager.close()


def test_a_spike_after_going_on_from_an_older_step(tmp_path: Path) -> None:
    """It goes back on the branch that was asked for, not to what lies beyond it."""
    job = Job(tmp_path, spikes=EAGER)
    job.run(20)
    job.manager.close()
    job = Job(tmp_path, once(8), spikes=EAGER)
    job.manager.restore(5)
    job.run(9)
    assert job.backs == [5]
    root = LocalStore(str(tmp_path))
    assert [(r.from_step, r.to_step) for r in read_history(root).rollbacks] == [(8, 5), (8, 5)]
    job.manager.close()


def test_an_outlier_is_left_out(tmp_path: Path) -> None:
    """Judged before the update, a bad step changes no weight, and is counted like any other."""
    policy = SpikePolicy(warmup=4, window=8, patience=2, on_outlier="skip_update")
    job = Job(tmp_path, spikes=policy)
    made = []
    for step in range(1, 9):
        is_made = job.manager.before_update(loss=99.0 if step == 6 else 1.0)
        made.append(is_made)
        job.state.progress.advance()
        assert not job.manager.after_step().must_break
    assert [step for step, is_made in enumerate(made, 1) if not is_made] == [6]
    # Without a loss now, and not judged before: an error, not a guess.
    job.state.progress.advance()
    with pytest.raises(MismatchError, match="no loss"):
        job.manager.after_step()
    job.manager.close()


def test_a_spike_before_the_update_is_answered_after_it(tmp_path: Path) -> None:
    """The update is not to be made; after_step then goes back."""
    job = Job(tmp_path, spikes=EAGER)
    job.run(7)
    assert not job.manager.before_update(loss=NAN)
    job.state.progress.advance()
    assert job.manager.after_step().rolled_back
    assert job.state.progress.step == 5
    job.manager.close()


# --- good, pinned, deleted ---


def test_a_checkpoint_becomes_good(tmp_path: Path) -> None:
    """After as many healthy steps as asked; latest(good=True) then finds it."""
    job = Job(tmp_path, spikes=EAGER)
    job.run(6)
    assert job.manager.latest(good=True) is None
    job.run(7)
    job.run(10)
    job.manager.close()
    root = LocalStore(str(tmp_path))
    assert {step: "good" in kinds(root, step) for step in (5, 10)} == {5: True, 10: False}
    with CheckpointManager(tmp_path, job.state) as manager:
        assert manager.latest(good=True).step == 5  # type: ignore[union-attr]
        assert manager.latest().step == 10  # type: ignore[union-attr]


def test_old_checkpoints_go(tmp_path: Path) -> None:
    """After each commit, in the background: the newest, every 10th, pinned and best ones stay."""
    root = LocalStore(str(tmp_path))
    keep = RetentionPolicy(last=2, every_steps=10, best=1, metric="accuracy", highest=True)
    job = Job(tmp_path, keep=keep, save=SavePolicy(every_steps=1, on_signal=False))
    for step in range(1, 13):
        job.state.progress.advance(samples=BATCH)
        job.manager.after_step(metrics={"accuracy": 1.0 if step == 4 else 0.5})
        if step == 2:
            job.manager.pin(2)
    job.manager.close()
    assert [f.step for f in whole(root)] == [12, 11, 10, 4, 2]


def test_candidates_live_until_they_are_judged(tmp_path: Path) -> None:
    """Saves come faster than judgements: the one that is judged next stays, so that there is a good one."""
    spikes = SpikePolicy(warmup=4, window=8, patience=1, healthy_steps=7)
    job = Job(
        tmp_path,
        keep=RetentionPolicy(last=1),
        spikes=spikes,
        save=SavePolicy(every_steps=2, on_signal=False),
    )
    for step in range(2, 21, 2):
        job.run(step)
        job.settle()  # what is deleted when is what this is about
    job.manager.close()
    root = LocalStore(str(tmp_path))
    # 2 was good at 9 and kept 8 as the next one, which was good at 15 and kept 14.
    found = {f.step: "good" in kinds(root, f.step) for f in whole(root)}
    assert found == {20: False, 14: False, 8: True}


def test_a_failing_save_deletes_nothing(tmp_path: Path) -> None:
    """What cannot be written costs no checkpoint; the next one that is committed does."""
    root = LocalStore(str(tmp_path))
    keep, save = RetentionPolicy(last=1), SavePolicy(on_signal=False)
    with FaultPlan(Fault("fail", verbs=("name",), key="step-000000003/*", count=1)) as plan:
        job = Job(FaultStore(root, plan), keep=keep, save=save)
        for step in (1, 2):
            job.state.progress.advance()
            if step == 1:
                job.manager.save()
        job.state.progress.advance()
        with pytest.raises(IncompleteWriteError):
            job.manager.save()
        assert [f.step for f in whole(root)] == [1]
        job.state.progress.advance()
        job.manager.save()
        job.manager.close()
    assert [f.step for f in whole(root)] == [4]


def test_what_fails_behind_training_fails_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A store that cannot delete now is told of in a warning, and the next commit tries again."""
    root = LocalStore(str(tmp_path))
    with FaultPlan(Fault("fail", verbs=("delete",), key="*/manifest.json", count=1)) as plan:
        job = Job(FaultStore(root, plan), keep=RetentionPolicy(last=1))
        for step in (5, 10, 15):
            job.run(step)
            job.settle()  # or one try would be for several commits
        job.manager.close()
    assert "could not look after the checkpoints now" in caplog.text
    assert [f.step for f in whole(root)] == [15]


# --- damage ---


def test_damage_is_passed_over_and_marked(tmp_path: Path) -> None:
    """The newest does not read back: the one before it is restored, and whoever looks can see why."""
    job = Job(tmp_path)
    job.run(10)
    job.manager.close()
    damage(tmp_path, 10)
    job = Job(tmp_path)
    with pytest.raises(CorruptCheckpointError):
        job.manager.restore(10)
    report = job.manager.restore()
    assert (report.step, [s.step for s in report.skipped]) == (5, [10])
    root = LocalStore(str(tmp_path))
    assert kinds(root, 10) == {"corrupt"}
    job.run(10)
    assert kinds(root, 10) == set()  # another attempt stands there
    job.manager.close()


def test_a_root_that_may_only_be_read_is_no_hindrance(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The mark cannot be made: that is told, and the restore goes on."""
    job = Job(tmp_path)
    job.run(10)
    job.manager.close()
    damage(tmp_path, 10)
    with FaultPlan(Fault("fail", verbs=("create",), key="*corrupt-*")) as plan:
        job = Job(FaultStore(LocalStore(str(tmp_path)), plan))
        assert job.manager.restore().step == 5
        job.manager.close()
    assert "could not mark step 10 as damaged" in caplog.text


# --- what the loop is told ---


def test_a_loop_is_told_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Saves, the last step and nothing at all, each with its reason."""
    caplog.set_level(logging.INFO)
    job = Job(tmp_path, save=SavePolicy(every_steps=5, last_step=12, on_signal=False))
    job.run(100)
    told = {n: o.reason for n, o in enumerate(job.outcomes, 1) if o.reason}
    assert told == {5: "steps", 10: "steps", 12: "last step"}
    assert job.outcomes[-1].should_stop
    assert (job.manager.should_stop, job.manager.exit_code) == (True, 0)
    job.manager.close()
    job = Job(tmp_path, save=SavePolicy(last_step=12, on_signal=False))
    job.manager.restore()
    assert job.manager.should_stop
    job.manager.close()


def test_a_missing_loss_is_an_error(tmp_path: Path) -> None:
    """With a spike policy each rank says its loss; what is no number is refused."""
    job = Job(tmp_path, spikes=EAGER)
    job.state.progress.advance()
    with pytest.raises(MismatchError, match=r"no loss on rank 0; call after_step\(loss"):
        job.manager.after_step()
    with pytest.raises(CheckpointError, match="no single number"):
        job.manager.after_step(loss=torch.ones(3))
    job.manager.close()


def test_what_was_usual_is_known_after_a_restart(tmp_path: Path) -> None:
    """The detector's window comes back with the checkpoint: no warmup again before a spike is seen."""
    job = Job(tmp_path, spikes=EAGER)
    job.run(10)
    job.manager.close()
    job = Job(tmp_path, once(12, value=100.0), spikes=EAGER)
    report = job.manager.restore()
    assert set(report.run) == {"uptime_s", "interruptions", "ended", "detector"}
    job.run(12)
    assert job.backs == [5]
    job.manager.close()


def damage(root: Path, step: int) -> None:
    """Change a byte of the data of a step's shard."""
    (shard,) = (root / step_folder(step)).glob("*/rank-00000-of-*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-3] ^= 1
    shard.write_bytes(content)


def kinds(root: LocalStore, step: int) -> set[str]:
    """Return the marks of the checkpoint that stands in a step's folder."""
    found = next(f for f in find_checkpoints(root) if f.step == step)
    assert found.attempt is not None
    return set(read_marks(root.child(step_folder(step)), found.attempt).kinds)


def whole(root: LocalStore) -> list[CheckpointInfo]:
    return [f for f in find_checkpoints(root) if isinstance(f, CheckpointInfo)]
