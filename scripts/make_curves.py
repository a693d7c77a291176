"""Train a small model in ways that go well and that do not, and record losses and gradient norms.

    python scripts/make_curves.py tests/curves                    the recorded curves that tests look at
    python scripts/make_curves.py /tmp/curves --seeds 20          more of them, for the tables in docs

Every curve is of a real training run: a byte-level language model, an MLP over the last eight bytes of
Python's standard library, whose batch is split over ranks as data parallelism splits it. What goes wrong goes
wrong in the data, the optimizer or the arithmetic, never in the recorded numbers.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from byte_text import StdlibText
from torch import nn
from torch.nn.functional import cross_entropy

NUM_STEPS, ONSET, NUM_RANKS = 600, 400, 2
CONTEXT, WIDTH, BATCH, PEAK_LR = 8, 64, 64, 3e-3


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a run is trained.

    Args:
        lr: Step -> learning rate.
        onset: Step at which it goes wrong; ``None`` if it never does.
        batch: Samples per rank.
        noise: Step, rank -> part of the samples that are random bytes.
        clip: Largest gradient norm.
        breaks: Whether a weight overflows at the onset.
    """

    lr: Callable[[int], float]
    onset: int | None = None
    batch: int = BATCH
    noise: Callable[[int, int], float] = lambda step, rank: 0.0
    clip: float = 1.0
    breaks: bool = False


def cosine(step: int, num_steps: int = NUM_STEPS) -> float:
    """Return the learning rate of a warmup over 20 steps and a half cosine."""
    warmup = min((step + 1) / 20, 1.0)
    return PEAK_LR * warmup * 0.5 * (1 + math.cos(math.pi * (step % num_steps) / num_steps))


def raised(factor: float) -> Callable[[int], float]:
    """Return a schedule that multiplies the learning rate from the onset on."""
    return lambda step: cosine(step) * (factor if step >= ONSET else 1.0)


def creeping(step: int) -> float:
    """Return a learning rate that doubles every 8 steps from the onset on."""
    return float(cosine(step) * 2 ** (max(step - ONSET, 0) / 8))


RECIPES = {
    "clean": Recipe(lr=cosine),
    "noisy": Recipe(lr=cosine, batch=2),
    "slow_drift": Recipe(lr=cosine, noise=lambda step, rank: 0.5 * step / NUM_STEPS),
    "cosine_restarts": Recipe(lr=lambda step: 5 * cosine(step, 150)),
    "single_outlier": Recipe(
        lr=cosine, onset=ONSET, noise=lambda step, rank: float(step == ONSET and rank == 1)
    ),
    "poisoned_rank": Recipe(
        lr=cosine, onset=ONSET, noise=lambda step, rank: float(step >= ONSET and rank == 1)
    ),
    "divergence": Recipe(lr=raised(300.0), onset=ONSET, clip=math.inf),
    "slow_divergence": Recipe(lr=creeping, onset=ONSET, clip=math.inf),
    "nan": Recipe(lr=cosine, onset=ONSET, breaks=True),
}


def main() -> None:
    """Record every curve."""
    parser = argparse.ArgumentParser(description="record loss curves of small training runs")
    parser.add_argument("out", type=Path, help="folder; one JSON file per curve")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each kind (1)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    tokens = StdlibText(4000, 256).tokens.long()
    for name, recipe in RECIPES.items():
        for seed in range(args.seeds):
            suffix = "" if args.seeds == 1 else f"-{seed}"
            document = {"kind": name, "onset": recipe.onset, **record(tokens, recipe, seed)}
            (args.out / f"{name}{suffix}.json").write_text(
                json.dumps(document, separators=(",", ":"), allow_nan=True) + "\n"
            )


def record(tokens: torch.Tensor, recipe: Recipe, seed: int) -> dict[str, list[object]]:
    """Train once; return per step each rank's loss and the gradient norm, four digits each."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Embedding(256, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, WIDTH), nn.GELU(),
        nn.Linear(WIDTH, 256),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    losses: list[object] = []
    norms: list[object] = []
    for step, batches in enumerate(draw(tokens, recipe)):
        if recipe.breaks and step == recipe.onset:
            with torch.no_grad():
                model[2].weight[0, 0] = math.inf
        per_rank = [cross_entropy(model(window[:, :-1]), window[:, -1]) for window in batches]
        optimizer.zero_grad()
        torch.stack(per_rank).mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr(step)
        optimizer.step()
        losses.append([short(loss.item()) for loss in per_rank])
        norms.append(short(norm.item()))
    return {"losses": losses, "grad_norms": norms}


def draw(tokens: torch.Tensor, recipe: Recipe) -> Iterator[list[torch.Tensor]]:
    """Yield each step's windows of text, one batch per rank, int64, shape (batch, CONTEXT + 1)."""
    for step in range(NUM_STEPS):
        batches = []
        for rank in range(NUM_RANKS):
            starts = torch.randint(len(tokens) - CONTEXT - 1, (recipe.batch, 1))
            windows = tokens[starts + torch.arange(CONTEXT + 1)]
            is_noise = torch.rand(recipe.batch, 1) < recipe.noise(step, rank)
            noise = torch.randint(256, windows.shape)
            batches.append(torch.where(is_noise, noise, windows))
        yield batches


def short(value: float) -> float:
    """Return a number with four digits."""
    return float(f"{value:.4g}")


if __name__ == "__main__":
    main()
