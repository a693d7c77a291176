"""Show what a resume loses that does not bring everything back.

    python scripts/ablate_resume.py docs/resume.png

One run is trained to its end. From its checkpoint in the middle it is resumed again and again, each time
without a part of its state; the losses are drawn beside those of the uninterrupted run, and a table tells how
far they are from them.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import torch
from byte_text import StdlibText
from torch import nn
from torch.nn.functional import cross_entropy

from fsdp_ckpt import CheckpointManager, ResumableSampler, SavePolicy, TrainState, make_loader

matplotlib.use("Agg")
from matplotlib import pyplot

NUM_STEPS, SAVED_AT, COMPARED = 400, 320, 50
SEQ_LEN, BATCH, WIDTH, NUM_SAMPLES, PEAK_LR = 64, 16, 64, 2400, 4e-3
SMOOTH = 10  # steps over which losses are averaged in the picture


class MasterAdamW(torch.optim.Optimizer):
    """AdamW on bfloat16 weights: float32 masters and moments, as in mixed-precision training."""

    def __init__(
        self, parameters: Any, lr: float, betas: tuple[float, float] = (0.9, 0.95)
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # takes no closure
        """Update masters, and round them into the weights."""
        for group in self.param_groups:
            first, second = group["betas"]
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    begin(weight, state)
                grad = weight.grad.float()
                state["step"] += 1
                state["exp_avg"].lerp_(grad, 1 - first)
                state["exp_avg_sq"].lerp_(grad * grad, 1 - second)
                mean = state["exp_avg"] / (1 - first ** state["step"])
                square = state["exp_avg_sq"] / (1 - second ** state["step"])
                state["master"] -= group["lr"] * mean / (square.sqrt() + 1e-8)
                weight.copy_(state["master"])


def begin(weight: torch.Tensor, state: dict[str, Any]) -> None:
    """Begin a parameter's state."""
    master = weight.detach().float().clone()
    state["step"], state["master"] = torch.zeros(()), master
    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)


class Model(nn.Module):
    """Predicts the next byte: a transformer of two layers, in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(SEQ_LEN, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(WIDTH, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(SEQ_LEN), False)
        self.bfloat16()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of predicting each token but the first."""
        hidden = self.tokens(tokens) + self.positions.weight
        logits = self.last(self.layers(hidden, mask=self.mask, is_causal=True))
        return cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


class Job:
    """The run; built anew for every resume."""

    def __init__(self, root: Path) -> None:
        torch.manual_seed(1)
        self.model = Model()
        self.optimizer = MasterAdamW(self.model.parameters(), PEAK_LR)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)
        self.sampler = ResumableSampler(NUM_SAMPLES, seed=2, rank=0, world_size=1)
        self.state = TrainState(
            model=self.model,
            optimizer=self.optimizer,
            lr_scheduler=self.scheduler,
            data=self.sampler,
        )
        self.loader = make_loader(
            StdlibText(NUM_SAMPLES, SEQ_LEN), self.sampler, batch_size=BATCH, drop_last=True
        )
        policy = SavePolicy(every_steps=SAVED_AT, on_signal=False)
        self.manager = CheckpointManager(root, self.state, save=policy)

    def run(self, until: int) -> list[float]:
        """Train until a step; return the losses."""
        losses: list[float] = []
        progress = self.state.progress
        while progress.step < until:
            for _, tokens in self.loader:
                loss = self.model(tokens)
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.scheduler.step()
                progress.advance(samples=BATCH)
                losses.append(loss.item())
                if progress.step <= SAVED_AT:
                    self.manager.after_step()
                if progress.step == until:
                    return losses
            progress.next_epoch()
        return losses


def factor(step: int) -> float:
    """Return the factor on the learning rate: up over 20 steps, then down along half a cosine."""
    done = min(step / NUM_STEPS, 1.0)
    return min((step + 1) / 20, 1.0) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))


# --- what is left out ---


def lose_moments(job: Job, fresh: Job) -> None:
    """Begin Adam anew, from the masters."""
    for state in job.optimizer.state.values():
        for name in ("step", "exp_avg", "exp_avg_sq"):
            state[name].zero_()


def lose_masters(job: Job, fresh: Job) -> None:
    """Begin the masters anew, from the rounded weights."""
    for weight, state in job.optimizer.state.items():
        state["master"].copy_(weight.detach())


def lose_schedule(job: Job, fresh: Job) -> None:
    """Begin with the warmup again."""
    job.scheduler.load_state_dict(fresh.scheduler.state_dict())
    job.optimizer.param_groups[0]["lr"] = fresh.optimizer.param_groups[0]["lr"]


def lose_place(job: Job, fresh: Job) -> None:
    """Begin with the first sample and the first random number again."""
    torch.manual_seed(1)
    job.sampler.load_state_dict(fresh.sampler.state_dict())


def lose_all_but_weights(job: Job, fresh: Job) -> None:
    """Keep what an export holds."""
    for lose in (lose_masters, lose_moments, lose_schedule, lose_place):
        lose(job, fresh)


WAYS: dict[str, Sequence[Callable[[Job, Job], None]]] = {
    "everything": (),
    "without moments": (lose_moments,),
    "without masters": (lose_masters,),
    "without schedule": (lose_schedule,),
    "without random states and cursor": (lose_place,),
    "weights only": (lose_all_but_weights,),
}


def main() -> int:
    """Train, resume in all ways, draw, and print the table; exit code 0 if the whole resume is exact."""
    parser = argparse.ArgumentParser(description="what a resume loses without a part of the state")
    parser.add_argument("picture", type=Path, help="PNG to write")
    picture = parser.parse_args().picture
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        job = Job(Path(root))
        reference = job.run(NUM_STEPS)
        job.manager.close()
        found = {name: resume(Path(root), ways) for name, ways in WAYS.items()}
    rest = reference[SAVED_AT:]
    print_table(rest, found)
    draw(picture, reference, found)
    return 0 if found["everything"] == rest else 1


def resume(root: Path, ways: Sequence[Callable[[Job, Job], None]]) -> list[float]:
    """Resume without some parts; return the losses."""
    job, fresh = Job(root), Job(root)
    untouched = copy.copy(fresh)
    job.manager.restore(SAVED_AT)
    for lose in ways:
        lose(job, untouched)
    losses = job.run(NUM_STEPS)
    job.manager.close()
    fresh.manager.close()
    return losses


def print_table(rest: Sequence[float], found: dict[str, list[float]]) -> None:
    """Print how far each resume is from the uninterrupted run, as Markdown."""
    print(f"| Resumed | Mean deviation of {COMPARED} steps | Largest | Higher on average by |")
    print("| --- | --- | --- | --- |")
    for name, losses in found.items():
        differences = [a - b for a, b in zip(losses, rest, strict=True)][:COMPARED]
        sizes = [abs(d) for d in differences]
        cells = (sum(sizes) / COMPARED, max(sizes), sum(differences) / COMPARED)
        print(f"| {name} | {' | '.join(f'{cell:.4f}' if any(sizes) else '0' for cell in cells)} |")


def draw(path: Path, reference: Sequence[float], found: dict[str, list[float]]) -> None:
    """Draw the run, and how far each resume is from it."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.8), width_ratios=(1, 2))
    left.plot(smooth(reference), color="0.4", linewidth=1)
    left.axvline(SAVED_AT, color="tab:red", linestyle=":", label="resumed from here")
    left.set_title("the uninterrupted run")
    left.set_ylabel(f"loss, mean of {SMOOTH} steps")
    left.legend()
    steps, rest = range(SAVED_AT + 1, NUM_STEPS + 1), reference[SAVED_AT:]
    for name, losses in found.items():
        differences = smooth([a - b for a, b in zip(losses, rest, strict=True)])
        right.plot(steps, differences, linewidth=1.5, label=name)
    right.set_title("what a resume changes")
    right.set_ylabel(f"loss less that of the uninterrupted run, mean of {SMOOTH} steps")
    right.legend(fontsize=8)
    for axes in (left, right):
        axes.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def smooth(losses: Sequence[float]) -> list[float]:
    """Return the mean of each loss and some before it."""
    return [
        sum(part) / len(part)
        for n in range(len(losses))
        if (part := losses[max(n + 1 - SMOOTH, 0) : n + 1])
    ]


if __name__ == "__main__":
    sys.exit(main())
