"""Show that a job survives: `make demo`.

    reference   4 ranks   1 .................................. 20
    killed      4 ranks   1 ...... 5 saved .. 8 SIGKILL
    resumed     4 ranks            6 ............. 15 saved
    resumed     2 ranks                               16 ..... 20 saved  ->  Hugging Face shards  ->  logits
    poisoned    4 ranks   1 .......... 10 saved .. 14 a spike, back to 10, past the data .......... 20

Everything lies under demo-out/, which is made anew; demo.png there shows the losses, and report.html what
saves and restores took. Exit code 0 only when every promise of the closing table is kept.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from demo_findings import Findings, print_findings
from demo_picture import draw_runs
from safetensors.numpy import load_file

REPOSITORY = Path(__file__).resolve().parent.parent
CONFIG = REPOSITORY / "configs" / "demo.toml"
OUT = REPOSITORY / "demo-out"
REFERENCE, RUN, LOGITS = OUT / "reference", OUT / "run", OUT / "logits.npy"
POISONED, PICTURE = OUT / "poisoned", OUT / "demo.png"
REPORT = OUT / "report.html"

NUM_RANKS, NUM_RANKS_LATER = 4, 2
KILL_AT, HOP_AT, POISON_AT = 8, 15, 14
SHARD_SIZE = "1MB"
PROMPT = "def main("
NUM_NEW_TOKENS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one launch of scripts/train.py wrote to its event file."""

    restored: dict[str, Any]
    ended: dict[str, Any] | None
    steps: dict[int, dict[str, Any]]
    saved: list[dict[str, Any]]
    rolled_back: list[dict[str, Any]]
    log: list[dict[str, Any]]


def main() -> int:
    """Run the jobs, compare them, print the table."""
    start = time.perf_counter()
    num_steps = tomllib.loads(CONFIG.read_text())["steps"]
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()

    reference = train(f"reference: {num_steps} steps", REFERENCE, NUM_RANKS)
    killed = train(f"killed in step {KILL_AT}", RUN, NUM_RANKS, "--kill-at", KILL_AT, dies=True)
    resumed = train(f"resumed up to step {HOP_AT}", RUN, NUM_RANKS, "--steps", HOP_AT)
    hopped = train("resumed again", RUN, NUM_RANKS_LATER, "--logits", LOGITS)
    poison = ("--poison-at", POISON_AT)
    poisoned = train(f"poisoned in step {POISON_AT}", POISONED, NUM_RANKS, *poison)

    findings = Findings()
    judge_resume(findings, reference, killed, resumed)
    judge_hop(findings, reference, resumed, hopped)
    judge_rollback(findings, poisoned, num_steps)
    tell_costs(findings, [reference, resumed, hopped])
    export(findings)
    call("report", "fsdp_ckpt", "report", RUN, "--out", REPORT)
    findings.tell("time of the whole demo", f"{time.perf_counter() - start:.0f} s")

    print_losses(reference, killed, resumed, hopped)
    logs = [run.log for run in (reference, killed, resumed, hopped)]
    draw_runs(PICTURE, logs, poisoned.log, kill_at=KILL_AT)
    print(f"\n{PICTURE.relative_to(REPOSITORY)}, {REPORT.relative_to(REPOSITORY)}")
    print_findings(findings)
    return 1 if findings.broken else 0


def train(what: str, root: Path, num_ranks: int, *options: object, dies: bool = False) -> Run:
    """Launch scripts/train.py under torchrun and read its events; exit where it does not end as told."""
    events = OUT / f"{what.replace(' ', '-').replace(':', '')}.jsonl"
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", num_ranks)
    job = (REPOSITORY / "scripts" / "train.py", CONFIG, "--root", root, "--events", events)
    output = call(f"{num_ranks} ranks, {what}", *launcher, *job, *options, fails=dies)
    if dies and "SIGKILL" not in output:
        sys.exit(f"the job died of something else than SIGKILL:\n{output}")
    records = [json.loads(line) for line in events.read_text().splitlines()]
    return Run(
        restored=next(r for r in records if r["event"] == "restored"),
        ended=next((r for r in records if r["event"] == "ended"), None),
        steps={r["step"]: r for r in records if r["event"] == "step"},
        saved=[r for r in records if r["event"] == "saved"],
        rolled_back=[r for r in records if r["event"] == "rolled back"],
        log=records,
    )


def call(what: str, *module: object, fails: bool = False) -> str:
    """Run a Python module with arguments in a process of its own; return what it printed."""
    print(f"{what} ...", end=" ", flush=True)
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", *map(str, module)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=REPOSITORY,
    )
    print(f"{time.perf_counter() - start:.1f} s", flush=True)
    if (done.returncode != 0) != fails:
        sys.exit(f"exit code {done.returncode}:\n{done.stdout}")
    return done.stdout


def judge_resume(findings: Findings, reference: Run, killed: Run, resumed: Run) -> None:
    """The killed run, gone on with on as many ranks, is the uninterrupted one to the bit."""
    saved, last = killed.saved[-1]["step"], max(killed.steps)
    findings.promise(
        "killed in the middle of a step, after a save",
        f"last step {last}, last save {saved}",
        kept=saved < last == KILL_AT - 1 and resumed.restored["step"] == saved,
    )
    equal = [step for step in resumed.steps if resumed.steps[step] == reference.steps[step]]
    findings.promise(
        "bit-equal steps on 4 ranks (loss, gradient norm, lr, samples)",
        f"{len(equal)} of {len(resumed.steps)}",
        kept=equal == list(range(saved + 1, HOP_AT + 1)),
    )
    same, total = count_equal_tensors(HOP_AT)
    findings.promise(
        f"bit-equal tensors of all ranks after step {HOP_AT} (weights, m, v, random states)",
        f"{same} of {total}",
        kept=same == total > 0,
    )


def count_equal_tensors(step: int) -> tuple[int, int]:
    """Compare the shard files of both runs: how many tensors have equal bytes, and how many there are."""
    same = total = 0
    for ours, theirs in zip(shard_files(RUN, step), shard_files(REFERENCE, step), strict=True):
        left, right = load_file(ours), load_file(theirs)
        total += len(left.keys() | right.keys())
        for key in left.keys() & right.keys():
            a, b = left[key], right[key]
            same += (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    return same, total


def judge_hop(findings: Findings, reference: Run, resumed: Run, hopped: Run) -> None:
    """Two ranks go on where four stopped: with their model, and with the samples that are left."""
    if resumed.ended is None:
        raise AssertionError("a run that ends with exit code 0 says so")
    same_logits = hopped.restored["logits"] == resumed.ended["logits"]
    findings.promise(
        "logits on 2 ranks after the restore, to the last bit those of 4 ranks",
        "equal" if same_logits else "different",
        kept=same_logits and hopped.restored["step"] == HOP_AT,
    )
    pairs = [(hopped.steps[step], reference.steps[step]) for step in sorted(hopped.steps)]
    same = [h["lr"] == r["lr"] and sorted(h["samples"]) == sorted(r["samples"]) for h, r in pairs]
    findings.promise(
        "steps on 2 ranks with the same lr and samples",
        f"{sum(same)} of {len(same)}",
        kept=all(same) and max(hopped.steps) == max(reference.steps),
    )
    difference = max(abs(h["loss"] - r["loss"]) for h, r in pairs)
    findings.tell(
        "largest difference of losses on 2 ranks (other dropout masks)", f"{difference:.2g}"
    )


def judge_rollback(findings: Findings, run: Run, num_steps: int) -> None:
    """Noise in one rank's data sends all ranks back to a good checkpoint, and never comes again."""
    back = run.rolled_back[0] if run.rolled_back else {"step": None, "to_step": None, "seconds": 0}
    findings.promise(
        f"noise on rank 1 in step {POISON_AT}: all ranks go back once, and on to step {num_steps}",
        f"from {back['step']} to {back['to_step']}",
        kept=len(run.rolled_back) == 1 and back["step"] == POISON_AT and num_steps in run.steps,
    )
    steps = [r for r in run.log if r["event"] == "step"]
    at = next((n for n, r in enumerate(steps) if r["step"] == POISON_AT), 0)
    bad = set(steps[at]["samples"])
    again = [r for r in steps[at + 1 :] if r["epoch"] == steps[at]["epoch"]]
    seen = sum(len(bad.intersection(r["samples"])) for r in again)
    findings.promise("samples of that step that are read again", seen, kept=seen == 0 < len(bad))
    twice = [r for r in steps if r["step"] == (back["to_step"] or 0) + 1]
    findings.promise(
        "first step after the rollback, bit-equal to what it was before",
        "equal" if len(twice) == 2 and twice[0] == twice[1] else "different",
        kept=len(twice) == 2 and twice[0] == twice[1],
    )
    findings.tell("time to go back", f"{back['seconds']:.3f} s")


def tell_costs(findings: Findings, runs: Sequence[Run]) -> None:
    """Sizes and times."""
    for step, num_ranks in ((HOP_AT, NUM_RANKS), (max(runs[-1].steps), NUM_RANKS_LATER)):
        sizes = [path.stat().st_size for path in shard_files(RUN, step)]
        shown = ", ".join(f"{size / 1e6:.3f}" for size in sizes)
        findings.tell(f"on disk per rank, of {num_ranks}", f"{shown} MB")
    findings.tell("time of a save", spread(save["seconds"] for run in runs for save in run.saved))
    findings.tell("time of a restore", spread(run.restored["seconds"] for run in runs[1:]))


def export(findings: Findings) -> None:
    """Write Hugging Face shards, load them, and compare with the live model that was saved."""
    import torch
    from byte_text import StdlibText, decode, encode
    from transformers import AutoModelForCausalLM, LlamaConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers
    options = tomllib.loads(CONFIG.read_text())
    LlamaConfig(**options["model"]).save_pretrained(OUT / "config")
    exported = OUT / "hugging-face"
    consolidate = ("fsdp_ckpt", "consolidate", RUN, exported, "--config-from", OUT / "config")
    call("consolidation", *consolidate, "--max-shard-size", SHARD_SIZE)
    index = json.loads((exported / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    findings.promise("Hugging Face shards", len(shards), kept=len(shards) > 1)

    torch.set_num_threads(1)  # as the ranks: the number of threads changes the order of sums
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        exported, output_loading_info=True, attn_implementation="eager"
    )
    model, loading = loaded
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        found = sorted(map(str, loading[kind]))
        findings.promise(kind.replace("_", " "), ", ".join(found) or "none", kept=not found)
    model.eval()
    text = StdlibText(options["data"]["num_samples"], options["data"]["seq_len"])
    with torch.no_grad():
        reloaded = model(input_ids=text.tokens[None, : text.seq_len].long()).logits[0].numpy()
    live = np.load(LOGITS)
    difference = np.abs(reloaded - live).max() if reloaded.shape == live.shape else np.inf
    findings.promise(
        "largest logit difference, live and reloaded", f"{difference:g}", kept=difference == 0
    )
    prompt = encode(PROMPT)[None]
    tokens = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NUM_NEW_TOKENS,
        do_sample=False,
    )
    findings.tell(f"continuation of {PROMPT!r}", repr(decode(tokens[0, prompt.shape[1] :])))


def shard_files(root: Path, step: int) -> list[Path]:
    """Return the shard files of a checkpoint, in rank order."""
    folder = root / f"step-{step:09d}"
    attempt = json.loads((folder / "manifest.json").read_text())["attempt"]
    return sorted((folder / attempt).glob("rank-*.safetensors"))


def spread(seconds: Iterable[float]) -> str:
    """Show the smallest, middle and largest of some times."""
    times = sorted(seconds)
    middle = times[len(times) // 2]
    return f"{middle:.3f} s ({times[0]:.3f} to {times[-1]:.3f}, {len(times)} times)"


def print_losses(reference: Run, killed: Run, resumed: Run, hopped: Run) -> None:
    """Print every step's loss, each run in a column; ``=`` marks what is bit-equal to the first."""
    print(f"\n{'step':>4}  {'uninterrupted':<22}", end="")
    print(f"{'killed':<22}{'resumed, 4 ranks':<22}{'resumed, 2 ranks':<20}".rstrip())
    for step, expected in reference.steps.items():
        cells = []
        for run in (killed, resumed, hopped):
            loss = run.steps[step]["loss"] if step in run.steps else None
            mark = "=" if loss == expected["loss"] else " "
            cells.append("" if loss is None else f"{mark} {loss!r}")
        if step == KILL_AT:
            cells[0] = "  SIGKILL"
        columns = "".join(f"{cell:<22}" for cell in cells)
        print(f"{step:>4}  {expected['loss']!r:<20}{columns}".rstrip())


if __name__ == "__main__":
    sys.exit(main())
