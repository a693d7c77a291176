"""Train a small Llama with FSDP2, in a job that survives: an example to copy.

    torchrun --nproc-per-node 4 scripts/train.py configs/demo.toml --root /data/run-1

Started again with the same root, on any number of ranks that divides the global batch, it goes on after
the newest whole checkpoint. Told to end, it leaves one and ends with exit code 75. After a spike of loss or
gradient norm it goes back to the newest good one, past the data that caused it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import os
import signal
import sys
import time
import tomllib
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
import torch.distributed as dist
from byte_text import StdlibText
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp_ckpt import (
    CheckpointManager,
    ResumableSampler,
    SavePolicy,
    SpikePolicy,
    TelemetryOptions,
    TrainState,
    make_loader,
    process_group,
)


def main() -> None:
    """Set up this rank's device and process group, train, and end cleanly."""
    parser = argparse.ArgumentParser(description="train a small Llama, or go on training it")
    parser.add_argument("config", type=Path, help="TOML, as configs/demo.toml")
    parser.add_argument("--root", required=True, help="where checkpoints go: a path or URL")
    parser.add_argument("--steps", type=int, help="stop after this step (default: the config's)")
    parser.add_argument("--events", type=Path, help="rank 0 appends JSON lines: losses and more")
    parser.add_argument("--logits", type=Path, help="rank 0 writes the final model's logits, .npy")
    parser.add_argument("--kill-at", type=int, metavar="STEP", help="crash in the middle of it")
    parser.add_argument(
        "--poison-at",
        type=int,
        metavar="STEP",
        help="rank 1 finds noise instead of text in its data",
    )
    args = parser.parse_args()
    config = tomllib.loads(args.config.read_text())

    logging.basicConfig(format="%(message)s")
    rank = int(os.environ["RANK"])
    logging.getLogger("fsdp_ckpt").setLevel(logging.INFO if rank == 0 else logging.ERROR)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    # Model and optimizer live in train() alone, so that they are gone when the group ends.
    with process_group("nccl" if device.type == "cuda" else "gloo"):
        exit_code = train(args, config, device)
    sys.exit(exit_code)


def train(args: argparse.Namespace, config: dict[str, Any], device: torch.device) -> int:
    """Restore what there is, train the steps that are left, save on the way; return the exit code."""
    seed, data = config["seed"], config["data"]
    num_steps, num_ranks = args.steps or config["steps"], dist.get_world_size()
    if data["global_batch"] % num_ranks:
        raise ValueError(f"{num_ranks} ranks do not divide the batch of {data['global_batch']}")
    log = args.events.open("a", buffering=1) if args.events and dist.get_rank() == 0 else None

    torch.manual_seed(seed)  # the same weights on every rank
    model = build_model(config["model"], device)
    optimizer = build_optimizer(model, config["optimizer"])
    factor = partial(warmup_cosine, num_steps=config["steps"], **config["schedule"])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    torch.manual_seed(seed + 1 + dist.get_rank())  # other dropout masks on every rank
    text = StdlibText(data["num_samples"], data["seq_len"])
    sampler = ResumableSampler(len(text), seed=seed)
    batch_size, num_workers = data["global_batch"] // num_ranks, data["num_workers"]
    loader = make_loader(
        text, sampler, batch_size=batch_size, num_workers=num_workers, drop_last=True
    )
    state = TrainState(model=model, optimizer=optimizer, lr_scheduler=scheduler, data=sampler)
    progress = state.progress
    poisoned = find_poisoned(args.poison_at, sampler, data["global_batch"])
    saves = SavePolicy(every_steps=config["save_every"], last_step=num_steps)
    spikes = SpikePolicy(**config["spikes"])
    telemetry = TelemetryOptions(
        flush_s=0.5, progress_s=0.1
    )  # so often since the demo takes seconds

    with CheckpointManager(
        args.root, state, save=saves, spikes=spikes, telemetry=telemetry
    ) as manager:
        report, seconds = timed(manager.restore)
        logits = digest(compute_logits(model, text, device))
        write(log, "restored", step=report.step, seconds=seconds, logits=logits)
        while not manager.should_stop:
            for ids, tokens in loader:
                if poisoned == (sampler.epoch, ids.tolist()):
                    tokens = torch.randint_like(tokens, tokens.max() + 1)
                loss = model(input_ids=tokens.to(device), labels=tokens.to(device)).loss
                loss.backward()
                norm = clip_grad_norm_(model.parameters(), config["max_grad_norm"])
                if progress.step + 1 == args.kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                lr = scheduler.get_last_lr()[0]
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                progress.advance(samples=len(ids) * num_ranks, tokens=tokens.numel() * num_ranks)

                mean_loss = gather(loss.detach()).mean().item()
                samples = gather(ids.to(device)).flatten().tolist()
                norm = norm.full_tensor().item()  # type: ignore[attr-defined]  # a DTensor
                done = {"step": progress.step, "epoch": progress.epoch, "lr": lr}
                write(log, "step", **done, loss=mean_loss, grad_norm=norm, samples=samples)
                outcome, seconds = timed(partial(manager.after_step, loss=loss, grad_norm=norm))
                if outcome.saved is not None:
                    write(log, "saved", step=progress.step, seconds=seconds)
                if outcome.rolled_back:
                    why = {"reason": outcome.reason, "seconds": seconds}
                    write(log, "rolled back", step=done["step"], to_step=progress.step, **why)
                if outcome.must_break:
                    break
            else:
                progress.next_epoch()

    final = compute_logits(model, text, device)
    write(log, "ended", step=progress.step, logits=digest(final))
    if args.logits and dist.get_rank() == 0:
        np.save(args.logits, final)
    return manager.exit_code


def find_poisoned(
    step: int | None, sampler: ResumableSampler, global_batch: int
) -> tuple[int, list[int]] | None:
    """Return epoch and sample indices of the batch that rank 1 reads in ``step``, on rank 1 alone."""
    if step is None or dist.get_rank() != 1:
        return None
    epoch, number = divmod(step - 1, sampler.num_samples // global_batch)
    ahead = ResumableSampler(sampler.num_samples, seed=sampler.seed)
    ahead.set_epoch(epoch)
    ahead.advance(number * global_batch)
    return epoch, list(islice(ahead, global_batch // dist.get_world_size()))


def build_model(options: dict[str, Any], device: torch.device) -> LlamaForCausalLM:
    """Return the model sharded over all ranks, layer by layer."""
    with device:
        model = LlamaForCausalLM(LlamaConfig(**options))
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def build_optimizer(model: torch.nn.Module, options: dict[str, Any]) -> torch.optim.Optimizer:
    """Return AdamW that decays matrices and leaves vectors alone; call it on the sharded model."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, **options)


def warmup_cosine(step: int, *, num_steps: int, warmup_steps: int, min_ratio: float) -> float:
    """Return the factor on the learning rate: up in a line, then down along half a cosine."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = min((step - warmup_steps) / max(num_steps - warmup_steps, 1), 1.0)
    return min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * done))


def gather(value: torch.Tensor) -> torch.Tensor:
    """Return every rank's ``value``, shape (num_ranks, *value.shape)."""
    values = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(values, value)
    return torch.stack(values)


@torch.no_grad()
def compute_logits(model: torch.nn.Module, text: StdlibText, device: torch.device) -> np.ndarray:
    """Return the logits of the text's first tokens, without dropout; the same on every rank.

    Called by every rank. float32, shape (seq_len, vocab_size).
    """
    tokens = text.tokens[: text.seq_len].long().to(device)
    model.eval()
    logits: torch.Tensor = model(input_ids=tokens[None]).logits[0]
    model.train()
    return logits.float().cpu().numpy()


def digest(array: np.ndarray) -> str:
    """Return a digest of the array's bytes: equal where they are."""
    return hashlib.sha256(array.tobytes()).hexdigest()


def timed(action: Callable[[], Any]) -> tuple[Any, float]:
    """Return what ``action`` returned, and how long it took in seconds."""
    start = time.perf_counter()
    return action(), time.perf_counter() - start


def write(log: TextIO | None, event: str, **fields: Any) -> None:
    """Append one JSON line; a rank without a log writes nothing."""
    if log is not None:
        print(json.dumps({"event": event, **fields}), file=log)


if __name__ == "__main__":
    main()
