"""Run the spike detector over recorded curves; print false alarms and delay as a table.

python scripts/tabulate_spikes.py tests/curves
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from fsdp_ckpt.stability.spike_detector import SpikeDetector
from fsdp_ckpt.stability.spike_policy import SpikePolicy

COLUMNS = (
    "Curve", "Runs", "Steps", "Suspicious before", "False alarms", "Found", "Delay, median", "Delay, most",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a detector says about one curve.

    Args:
        num_steps: Steps looked at.
        num_suspicious: Suspicious ones before the onset; in a run that goes well, all.
        num_false: Spikes before the onset; in a run that goes well, all.
        delay: From the onset to the first spike from there on, in steps; ``None`` without one.
    """

    num_steps: int
    num_suspicious: int
    num_false: int
    delay: int | None


def judge(curve: dict[str, Any], policy: SpikePolicy) -> Outcome:
    """Feed one curve to a detector, up to the first spike from the onset on."""
    detector, onset = SpikeDetector(policy), curve["onset"]
    num_suspicious = num_false = step = 0
    delay = None
    for step, losses in enumerate(curve["losses"]):
        norms = [curve["grad_norms"][step]] * len(losses)
        decision = detector.observe(step, losses, norms)
        is_spike = decision.action == policy.on_spike
        if onset is not None and step >= onset:
            if is_spike:
                delay = step - onset
                break
            continue
        num_suspicious += not decision.is_healthy
        num_false += is_spike
    return Outcome(
        num_steps=step + 1, num_suspicious=num_suspicious, num_false=num_false, delay=delay
    )


def read_curves(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the curves in a folder, by kind."""
    curves = defaultdict(list)
    for path in sorted(folder.glob("*.json")):
        curve = json.loads(path.read_text())
        curves[curve["kind"]].append(curve)
    return dict(curves)


def rows(curves: dict[str, list[dict[str, Any]]], policy: SpikePolicy) -> list[tuple[str, ...]]:
    """Return the table's rows, those without an onset first."""
    table = []
    kinds = sorted(curves, key=lambda kind: (curves[kind][0]["onset"] is not None, kind))
    for kind in kinds:
        outcomes = [judge(curve, policy) for curve in curves[kind]]
        goes_wrong = curves[kind][0]["onset"] is not None
        delays = [o.delay for o in outcomes if o.delay is not None]
        table.append(
            (
                kind.replace("_", " "),
                str(len(outcomes)),
                str(sum(o.num_steps for o in outcomes)),
                str(sum(o.num_suspicious for o in outcomes)),
                str(sum(o.num_false for o in outcomes)),
                f"{len(delays)}" if goes_wrong else "–",
                f"{median(delays):g}" if delays else "–",
                f"{max(delays)}" if delays else "–",
            )
        )
    return table


def main() -> None:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(description="tabulate the spike detector's answers")
    parser.add_argument("curves", type=Path, help="folder of make_curves.py")
    for name in ("patience", "window", "warmup"):
        parser.add_argument(f"--{name}", type=int, default=getattr(SpikePolicy(), name))
    parser.add_argument("--loss-sigmas", type=float, default=SpikePolicy().loss_sigmas)
    args = parser.parse_args()
    policy = SpikePolicy(
        patience=args.patience,
        window=args.window,
        warmup=args.warmup,
        loss_sigmas=args.loss_sigmas,
    )
    print(f"| {' | '.join(COLUMNS)} |")
    print(f"|{' --- |' * len(COLUMNS)}")
    for row in rows(read_curves(args.curves), policy):
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
