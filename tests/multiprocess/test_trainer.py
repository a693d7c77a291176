"""transformers.Trainer goes on from our checkpoints as if it had never ended."""

from __future__ import annotations

import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_ckpt import CorruptCheckpointError, MismatchError, SaveOptions, SavePolicy
from fsdp_ckpt.testing import run_ranks
from tests.bits import bits

pytestmark = [pytest.mark.few_ranks, pytest.mark.slow]

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TQDM_DISABLE"] = "1"
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

NUM_SAMPLES, BATCH_SIZE, NUM_STEPS = 44, 4, 16


class KilledError(Exception):
    """Stands for the end of the process, where the test is that process."""


class Killer(transformers.TrainerCallback):  # type: ignore[misc]  # has no types
    """Ends training in the middle of a step, with the callbacks after it not called."""

    def __init__(self, at_step: int | None, *, process: bool) -> None:
        self.at_step, self.process = at_step, process

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self.at_step:
            if self.process:
                os.kill(os.getpid(), signal.SIGKILL)
            raise KilledError


class Words(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(8) * (index + 3) + index) % 31
        return {"input_ids": tokens, "labels": tokens}


def make_model() -> nn.Module:
    """A model with dropout, so that random states count."""
    config = transformers.GPT2Config(
        vocab_size=31, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(0)
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def shard_by_accelerate(version: int) -> dict[str, Any]:
    """Return arguments with which Trainer shards the model, here on the CPU."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    # Accelerate shards on accelerators alone, though its code for it does well without one.
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    config = {"version": version, "transformer_layer_cls_to_wrap": ["GPT2Block"]}
    return {"fsdp": "full_shard" if version == 1 else True, "fsdp_config": config}


def train(
    folder: str,
    *,
    kill_at: int | None = None,
    fsdp: int = 0,
    process: bool = False,
    save: SavePolicy | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train to the end or the kill, from the newest checkpoint in ``folder``; return what it came to."""
    from fsdp_ckpt.integrations.transformers import CheckpointCallback

    if fsdp:
        options |= shard_by_accelerate(fsdp)
    args = transformers.TrainingArguments(
        output_dir=f"{folder}/trainer",
        use_cpu=True,
        per_device_train_batch_size=BATCH_SIZE,
        max_steps=NUM_STEPS,
        learning_rate=1e-2,
        warmup_steps=3,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        seed=5,
        **options,
    )
    # Committed when training goes on: a kill right after it finds the checkpoint whole.
    checkpoints = CheckpointCallback(
        f"{folder}/run", save=save, options=SaveOptions(mode="sync"), timeout_s=60
    )
    trainer = transformers.Trainer(
        make_model(),
        args,
        train_dataset=Words(),
        eval_dataset=Words(),
        callbacks=[Killer(kill_at, process=process), checkpoints],
    )
    trainer.train(resume_from_checkpoint=checkpoints.resume_from(trainer))
    timing = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss")
    history = [
        {name: value for name, value in line.items() if name not in timing}
        for line in trainer.state.log_history
    ]
    assert checkpoints.report is not None
    return {
        "restored": checkpoints.report.step,
        "history": history,
        "state": bits(
            {
                "model": _whole(trainer.model.state_dict()),
                "optimizer": _whole(trainer.optimizer.state_dict()["state"]),
                "schedule": trainer.lr_scheduler.state_dict(),
                "random": torch.get_rng_state(),
            }
        ),
        "step": trainer.state.global_step,
        "exit_code": checkpoints.exit_code,
        "pickles": sorted(
            p.name for p in Path(folder).rglob("*") if p.suffix in (".pt", ".bin", ".pth")
        ),
    }


def _whole(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _whole(value) for key, value in tree.items()}
    return tree.full_tensor() if hasattr(tree, "full_tensor") else tree


@pytest.mark.parametrize(
    ("kill_at", "restored", "options"),
    [
        pytest.param(9, 8, {"save_strategy": "steps", "save_steps": 4}, id="mid-epoch"),
        pytest.param(15, 11, {"save_strategy": "epoch"}, id="epoch end"),
        pytest.param(
            7,
            6,
            {
                "save_strategy": "no",
                "save": SavePolicy(every_steps=3),
                "gradient_accumulation_steps": 3,
            },
            id="policy, accumulated",
        ),
    ],
)
def test_a_killed_training_ends_as_one_that_was_not(
    tmp_path: Path, kill_at: int, restored: int, options: dict[str, Any]
) -> None:
    """Losses, weights, moments, schedule and random states, to the bit; and nothing is pickled."""
    whole = train(str(tmp_path / "whole"), **options)
    with pytest.raises(KilledError):
        train(str(tmp_path / "cut"), kill_at=kill_at, **options)
    resumed = train(str(tmp_path / "cut"), **options)
    assert (whole.pop("restored"), resumed.pop("restored")) == (None, restored)
    assert resumed == whole
    assert resumed["pickles"] == []
    assert resumed["step"] == NUM_STEPS


EVERY_FOUR = {"save_strategy": "steps", "save_steps": 4}


def whole_and_killed(folder: str, fsdp: int) -> None:
    """On each rank: one training to its end, and one of which rank 1 is killed."""
    whole = train(f"{folder}/whole", fsdp=fsdp, **EVERY_FOUR)
    Path(f"{folder}/whole-{dist.get_rank()}").write_bytes(pickle.dumps(whole))
    dist.barrier()
    kill_at = 7 if dist.get_rank() == 1 else None
    train(f"{folder}/cut", kill_at=kill_at, fsdp=fsdp, process=True, **EVERY_FOUR)


def resumed(folder: str, fsdp: int) -> dict[str, Any]:
    return train(f"{folder}/cut", fsdp=fsdp, **EVERY_FOUR)


@pytest.mark.parametrize("fsdp", [2, 0], ids=["FSDP2", "DDP"])
def test_a_rank_that_is_killed_under_two_ranks(tmp_path: Path, fsdp: int) -> None:
    """The next job goes on from what the ranks had committed, and comes to what one job would have."""
    killed = run_ranks(whole_and_killed, 2, str(tmp_path), fsdp, check=False)
    assert killed[1].exit_code == -signal.SIGKILL, killed[1].log
    found = run_ranks(resumed, 2, str(tmp_path), fsdp).values
    for rank, end in enumerate(found):
        whole = pickle.loads((tmp_path / f"whole-{rank}").read_bytes())
        assert (whole.pop("restored"), end.pop("restored")) == (None, 4)
        assert end == whole


class Notice(transformers.TrainerCallback):  # type: ignore[misc]  # has no types
    """The machine is told to end in the middle of step 5."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4:
            signal.raise_signal(signal.SIGTERM)


def test_a_training_that_is_told_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves a checkpoint of the step that it was at, says so, and ends as one that was left alone."""
    whole = train(str(tmp_path / "whole"), save_strategy="no")
    with monkeypatch.context() as patch:
        patch.setattr(Killer, "on_pre_optimizer_step", Notice.on_pre_optimizer_step)
        ended = train(str(tmp_path / "cut"), save_strategy="no")
    assert (ended["exit_code"], ended["step"]) == (os.EX_TEMPFAIL, 6)
    resumed = train(str(tmp_path / "cut"), save_strategy="no")
    assert resumed == {**whole, "restored": 5}


def damage_newest(folder: Path) -> None:
    shard = max(folder.glob("run/step-*/*/*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)


def test_a_damaged_checkpoint_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once where it shows at once; where only weights show it, the next start passes over it."""
    from fsdp_ckpt.integrations.transformers import CheckpointCallback

    whole = train(str(tmp_path), **EVERY_FOUR)
    damage_newest(tmp_path)
    assert train(str(tmp_path), **EVERY_FOUR) == {**whole, "restored": 12}
    resume_from = CheckpointCallback.resume_from

    def find_and_damage(self: Any, trainer: Any) -> Any:
        found = resume_from(self, trainer)
        damage_newest(tmp_path)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointCallback, "resume_from", find_and_damage)
        with pytest.raises(
            CorruptCheckpointError, match="only begin with the checkpoint of step 12"
        ):
            train(str(tmp_path), **EVERY_FOUR)
    assert train(str(tmp_path), **EVERY_FOUR) == {**whole, "restored": 12}


def test_what_needs_trainers_own_checkpoints_is_refused(tmp_path: Path) -> None:
    """At the start, not at the first evaluation."""
    with pytest.raises(MismatchError, match="Trainer's own checkpoints"):
        train(
            str(tmp_path), save_strategy="best", eval_strategy="steps", load_best_model_at_end=True
        )


def test_a_start_that_did_not_ask_for_the_checkpoint_is_refused(tmp_path: Path) -> None:
    """Else Trainer would begin its data anew, with weights that have seen it."""
    train(str(tmp_path), **EVERY_FOUR)
    from fsdp_ckpt.integrations.transformers import CheckpointCallback

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointCallback, "resume_from", lambda self, trainer: None)
        with pytest.raises(CorruptCheckpointError, match="resume_from"):
            train(str(tmp_path), **EVERY_FOUR)
