"""transformers.Trainer with our checkpoints in the place of its own.

    torchrun --nproc-per-node 2 examples/trainer.py RUN-FOLDER

Needs the ``hf`` extra. Started again with the same folder, it goes on after its newest checkpoint. On GPUs,
``TrainingArguments(fsdp=…)`` shards the model; the lines about checkpoints stay as they are.
"""

from __future__ import annotations

import sys

import torch
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from fsdp_ckpt import end_process_group
from fsdp_ckpt.integrations.transformers import CheckpointCallback

NUM_STEPS = 12


class Sequences(Dataset):
    """Forty sequences that a model can learn."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(8) + index) % 31
        return {"input_ids": tokens, "labels": tokens}


class Printer(TrainerCallback):
    """Says where training is; ahead of the checkpoints, which come last."""

    has_begun = False

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        if state.is_world_process_zero and not self.has_begun:
            print(f"begins at step {state.global_step}", flush=True)
        self.has_begun = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float],
        **kwargs: object,
    ) -> None:
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step} loss {logs['loss']:.9f}", flush=True)


def train(root: str) -> int:
    """Train from the newest checkpoint under ``root``, or from the start; return the exit code."""
    config = GPT2Config(
        vocab_size=31, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(0)
    args = TrainingArguments(
        output_dir=f"{root}/trainer",
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=4,
        max_steps=NUM_STEPS,
        save_strategy="steps",
        save_steps=4,
        logging_steps=1,
        disable_tqdm=True,
        report_to=[],
    )
    checkpoints = CheckpointCallback(f"{root}/checkpoints")
    trainer = Trainer(
        GPT2LMHeadModel(config), args, train_dataset=Sequences(), callbacks=[Printer(), checkpoints]
    )
    trainer.train(resume_from_checkpoint=checkpoints.resume_from(trainer))
    if trainer.is_world_process_zero():
        config.save_pretrained(f"{root}/config")  # for consolidation
    return checkpoints.exit_code


if __name__ == "__main__":
    code = train(sys.argv[1])
    end_process_group()
    sys.exit(code)
