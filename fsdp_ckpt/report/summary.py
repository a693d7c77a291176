"""The few numbers to know of a run, as the page's head and the terminal show them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from fsdp_ckpt.report.run import Run
from fsdp_ckpt.report.units import BYTES, RATE, SECONDS

__all__ = ["Number", "summary_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """One number.

    Args:
        name: What it is.
        value: With its unit.
        is_bad: Whether it is to be looked at.
    """

    name: str
    value: str
    is_bad: bool = False


def summary_of(run: Run) -> Iterator[Number]:
    """Yield the numbers, the most important first."""
    committed, outcomes = run.committed, Counter(save.outcome for save in run.saves)
    yield Number(name="of the time lost", value=f"{100 * run.losses.lost_fraction:.3g} %")
    yield Number(name="checkpoints saved", value=str(len(committed)))
    if outcomes["failed"]:
        yield Number(name="saves failed", value=str(outcomes["failed"]), is_bad=True)
    if outcomes["skipped"]:
        yield Number(name="saves skipped", value=str(outcomes["skipped"]))
    if committed:
        stall_s = median(save.stall_s for save in committed)
        yield Number(name="training waits per save, median", value=SECONDS.text(stall_s))
        total_s = median(save.total_s for save in committed)
        yield Number(name="until committed, median", value=SECONDS.text(total_s))
    rates = [save.rate for save in committed if save.rate is not None]
    if rates:
        yield Number(name="written, all ranks, median", value=RATE.text(median(rates)))
    sizes = [save.num_bytes for save in committed if save.num_bytes is not None]
    if sizes:
        yield Number(name="newest checkpoint", value=BYTES.text(sizes[-1]))
    yield Number(name="ranks", value=_world_sizes(run))
    yield Number(name="starts of the job", value=str(len(run.lives)))
    kinds = Counter(incident.kind for incident in run.incidents)
    for kind, name in (("rollback", "rollbacks"), ("checkpoint passed over", "passed over")):
        if kinds[kind]:
            yield Number(name=name, value=str(kinds[kind]), is_bad=True)


def _world_sizes(run: Run) -> str:
    sizes = [life.world_size for life in run.lives]
    changes = [size for n, size in enumerate(sizes) if n == 0 or size != sizes[n - 1]]
    shown = " → ".join(map(str, changes[-3:]))
    return f"… → {shown}" if len(changes) > 3 else shown
