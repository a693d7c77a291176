"""Train a small Llama with FSDP2, in a job that survives: an example to copy.

    torchrun --nproc-per-node 4 scripts/train.py configs/demo.toml --root /data/run-1

Started again with the same root, on any number of ranks that divides the global batch, it goes on after
the newest whole checkpoint.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import os
import signal
import time
import tomllib
from collections.abc import Callable
from functools import partial
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

from fsdp_ckpt import CheckpointManager, ResumableSampler, TrainState, make_loader, process_group


def main() -> None:
    """Set up this rank's device and process group, train, and end cleanly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("config", type=Path, help="TOML, as configs/demo.toml")
    parser.add_argument("--root", required=True, help="where checkpoints go: a path or URL")
    parser.add_argument("--steps", type=int, help="stop after this step (default: the config's)")
    parser.add_argument("--events", type=Path, help="rank 0 appends JSON lines: losses and more")
    parser.add_argument("--logits", type=Path, help="rank 0 writes the last model's logits, .npy")
    parser.add_argument("--kill-at", type=int, metavar="STEP", help="crash in the middle of this step")
    args = parser.parse_args()
    config = tomllib.loads(args.config.read_text())

    logging.basicConfig()
    rank = int(os.environ["RANK"])
    logging.getLogger("fsdp_ckpt").setLevel(logging.INFO if rank == 0 else logging.ERROR)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    # Nothing of train() may live on when the group ends: see fsdp_ckpt.process_group.
    with process_group("nccl" if device.type == "cuda" else "gloo"):
        train(args, config, device)


def train(args: argparse.Namespace, config: dict[str, Any], device: torch.device) -> None:
    """Restore what there is, train the steps that are left, save on the way."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    data, seed = config["data"], config["seed"]
    num_steps = args.steps or config["steps"]
    if data["global_batch"] % world_size:
        raise ValueError(f"{world_size} ranks do not divide the batch of {data['global_batch']}")
    log = args.events.open("a", buffering=1) if args.events and rank == 0 else None

    torch.manual_seed(seed)  # the same weights on every rank
    model = build_model(config["model"], device)
    optimizer = build_optimizer(model, config["optimizer"])
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, partial(warmup_cosine, num_steps=config["steps"], **config["schedule"])
    )
    torch.manual_seed(seed + 1 + rank)  # other dropout masks on every rank
    text = StdlibText(data["num_samples"], data["seq_len"])
    sampler = ResumableSampler(len(text), seed=seed)
    loader = make_loader(
        text,
        sampler,
        batch_size=data["global_batch"] // world_size,
        num_workers=data["num_workers"],
        drop_last=True,
    )
    state = TrainState(model=model, optimizer=optimizer, lr_scheduler=scheduler, data=sampler)
    progress = state.progress

    with CheckpointManager(args.root, state) as manager:
        report, seconds = timed(manager.restore)
        logits = compute_logits(model, text, device)
        write(log, "restored", step=report.step, seconds=seconds, logits=digest(logits))
        model.train()
        while progress.step < num_steps:
            for ids, tokens in loader:
                loss = model(input_ids=tokens.to(device), labels=tokens.to(device)).loss
                loss.backward()
                grad_norm = clip_grad_norm_(model.parameters(), config["max_grad_norm"])
                if args.kill_at == progress.step + 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                lr = scheduler.get_last_lr()[0]
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                progress.advance(samples=data["global_batch"], tokens=tokens.numel() * world_size)
                losses, samples = gather(loss), gather(ids.to(device))
                write(
                    log,
                    "step",
                    step=progress.step,
                    epoch=progress.epoch,
                    loss=losses.mean().item(),
                    grad_norm=grad_norm.full_tensor().item(),
                    lr=lr,
                    samples=samples.flatten().tolist(),
                )
                if progress.step % config["save_every"] == 0 or progress.step == num_steps:
                    handle, seconds = timed(manager.save)
                    write(log, "saved", step=progress.step, seconds=seconds, url=handle.wait().url)
                if progress.step == num_steps:
                    break
            else:
                progress.next_epoch()

    logits = compute_logits(model, text, device)
    write(log, "ended", step=progress.step, logits=digest(logits))
    if args.logits and rank == 0:
        np.save(args.logits, logits)


def build_model(options: dict[str, Any], device: torch.device) -> torch.nn.Module:
    """Return the model sharded over all ranks, layer by layer."""
    # Eager attention: the one that applies dropout the same way on every device.
    config = LlamaConfig(**options, attn_implementation="eager", use_cache=False)
    model = LlamaForCausalLM(config).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def build_optimizer(model: torch.nn.Module, options: dict[str, Any]) -> torch.optim.Optimizer:
    """Return AdamW that decays matrices and leaves vectors alone; call it on the sharded model."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, **options)


def warmup_cosine(step: int, *, num_steps: int, warmup_steps: int, min_lr_ratio: float) -> float:
    """Return the factor on the learning rate: up in a line, then down along half a cosine."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = min((step - warmup_steps) / max(num_steps - warmup_steps, 1), 1.0)
    return min_lr_ratio + (1.0 - min_lr_ratio) * 0.5 * (1.0 + math.cos(math.pi * done))


def gather(value: torch.Tensor) -> torch.Tensor:
    """Return every rank's ``value``, shape (world_size, *value.shape)."""
    values = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(values, value.detach())
    return torch.stack(values)


@torch.no_grad()
def compute_logits(model: torch.nn.Module, text: StdlibText, device: torch.device) -> np.ndarray:
    """Return the logits of the text's first tokens, float32, shape (seq_len, vocab_size).

    Called by every rank, with the same result. Leaves the model in eval mode.
    """
    model.eval()
    tokens = text.tokens[: text.seq_len].long().to(device)
    return model(input_ids=tokens[None]).logits[0].float().cpu().numpy()


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
