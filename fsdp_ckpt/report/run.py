"""What a report knows of a run: plain numbers, which the pictures, the page and ``--json`` share.

All times are seconds since 1970 by the coordinators' clocks; all lengths are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = [
    "PHASES",
    "Incident",
    "Life",
    "Losses",
    "RankSave",
    "Restore",
    "Run",
    "Save",
    "Straggler",
]

# Of a save, in the order in which a rank goes through them.
PHASES = ("wait", "plan", "copy", "persist", "seal", "publish")
Outcome = Literal["committed", "failed", "skipped", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSave:
    """A save as one rank saw it.

    Args:
        rank: Which.
        spans: Phase → (begin, end).
        stall_s: What it took from this rank's training.
        num_bytes: Of its file.
    """

    rank: int
    spans: Mapping[str, tuple[float, float]]
    stall_s: float | None = None
    num_bytes: int | None = None

    @property
    def begun_s(self) -> float | None:
        """When it began here."""
        return min((begin for begin, _ in self.spans.values()), default=None)

    @property
    def durable_s(self) -> float | None:
        """When this rank's file was durable."""
        return self.spans["persist"][1] if "persist" in self.spans else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """The rank that the others waited for.

    Args:
        rank: Which.
        behind_s: How much later than the median rank its file was durable.
        phase: In which it lost most of that.
    """

    rank: int
    behind_s: float
    phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """One save.

    Args:
        life: In which start of the job, counted from 0.
        step: Training step.
        attempt: Its id; ``None`` where it was refused before it had one.
        mode: When the call returned: ``async``, ``lazy``, ``sync``.
        outcome: ``unknown``: the job ended, or is, between its begin and its commit.
        begun_s: When the first rank called.
        ended_s: When it was committed or failed; else the last that is known of it.
        stall_s: What it took from training, on the rank where it took most.
        num_bytes: Of the checkpoint.
        rate: Bytes per second over all ranks, while any of them wrote.
        straggler: ``None`` with fewer than three ranks, or where none was behind.
        error: Why it failed.
        ranks: Each rank's view, in rank order.
    """

    life: int
    step: int
    attempt: str | None
    mode: str
    outcome: Outcome
    begun_s: float
    ended_s: float
    stall_s: float
    num_bytes: int | None
    rate: float | None
    straggler: Straggler | None
    error: str | None
    ranks: tuple[RankSave, ...]

    @property
    def total_s(self) -> float:
        """From the call to the end."""
        return max(self.ended_s - self.begun_s, 0.0)

    @property
    def overlap(self) -> float | None:
        """Share of its time that training went on beside it."""
        if self.outcome != "committed" or self.total_s <= 0:
            return None
        return max(1.0 - self.stall_s / self.total_s, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """One restore, those of rollbacks among them.

    Args:
        life: In which start of the job.
        step: Restored; ``None`` where the run started fresh.
        begun_s: When it began.
        seconds: On the slowest rank.
        laps: Phase → seconds, on the slowest rank in each.
    """

    life: int
    step: int | None
    begun_s: float
    seconds: float
    laps: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """Something out of the ordinary.

    Args:
        at_s: When.
        life: In which start of the job.
        kind: Such as ``rollback`` or ``save failed``.
        step: Where it is known.
        text: What there is to say.
        to_step: Of a rollback.
    """

    at_s: float
    life: int
    kind: str
    step: int | None
    text: str
    to_step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One start of the job.

    Args:
        id: Of the start.
        begun_s: First that is known of it.
        ended_s: Last that is known of it.
        world_size: Its ranks.
        has_ended: Whether it ended by itself, rather than being killed or still running.
        progress: (time, step), in order of time.
    """

    id: str
    begun_s: float
    ended_s: float
    world_size: int
    has_ended: bool
    progress: tuple[tuple[float, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Where the time of a run went.

    Args:
        running_s: Of all starts of the job together.
        stall_s: Training waited for saves.
        restore_s: State was brought back, rollbacks included.
        redone_s: Steps that were made again, since a start died or the run went back.
        stopped_s: Between two starts; no part of ``running_s``.
    """

    running_s: float
    stall_s: float
    restore_s: float
    redone_s: float
    stopped_s: float

    @property
    def lost_s(self) -> float:
        """Seconds of ``running_s`` that trained nothing new."""
        return min(self.stall_s + self.restore_s + self.redone_s, self.running_s)

    @property
    def lost_fraction(self) -> float:
        """The same as a share."""
        return self.lost_s / self.running_s if self.running_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything a report shows.

    Args:
        root: The run's root.
        lives: Starts of the job.
        saves: In the order in which they began.
        restores: Likewise.
        incidents: Likewise.
        growth: (time, bytes of all checkpoints that were saved and not deleted since).
        losses: Where the time went.
        notes: What could not be read.
    """

    root: str
    lives: tuple[Life, ...]
    saves: tuple[Save, ...] = ()
    restores: tuple[Restore, ...] = ()
    incidents: tuple[Incident, ...] = ()
    growth: tuple[tuple[float, int], ...] = ()
    losses: Losses
    notes: tuple[str, ...] = field(default=())

    @property
    def committed(self) -> list[Save]:
        """Saves that became checkpoints."""
        return [save for save in self.saves if save.outcome == "committed"]
