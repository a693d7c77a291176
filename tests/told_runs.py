"""Telemetry of runs that never were: written as a job writes it, with every number known."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from fsdp_ckpt.storage.store import Store
from fsdp_ckpt.telemetry.event import FORMAT, VERSION, Event
from fsdp_ckpt.telemetry.log import TelemetryLog
from fsdp_ckpt.telemetry.start import FOLDER

__all__ = ["BEGUN_S", "Told", "tell_run"]

BEGUN_S = 1_790_000_000.0
SHARD_BYTES = 1_500_000_000


class Told:
    """One start of a job whose ranks tell what the test says.

    Args:
        root: The run's root.
        number: Of the start, from 0.
        world_size: Ranks.
        begun_s: When it began, in seconds since the run did.
        silent: Ranks that leave nothing.
        ahead_s: Rank -> how far its clock is ahead.
        host: Of all ranks.
    """

    def __init__(
        self,
        root: Store,
        number: int,
        world_size: int,
        begun_s: float,
        *,
        silent: Sequence[int] = (),
        ahead_s: dict[int, float] | None = None,
        host: str | None = None,
    ) -> None:
        self.id = f"20260131T09{number:02d}00000000-0123456789ab"
        self.world_size = world_size
        self.store = root.child(FOLDER).child(self.id)
        self.ahead_s = ahead_s or {}
        self.host = host
        self.logs = {
            rank: TelemetryLog(self.store, rank, self._header(rank), 2**30)
            for rank in range(world_size)
            if rank not in silent
        }
        self.all("run.started", begun_s, world_size=world_size)

    def _header(self, rank: int) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "start": self.id,
            "rank": rank,
            "world_size": self.world_size,
            "host": self.host,
            "clock_ahead_s": self.ahead_s.get(rank, 0.0),
        }

    def one(
        self, rank: int, name: str, at_s: float, seconds: float | None = None, **how: Any
    ) -> None:
        """Let a rank tell of something, ``at_s`` seconds since the run began."""
        if rank not in self.logs:
            return
        step, attempt = how.pop("step", None), how.pop("attempt", None)
        self.logs[rank].add(
            Event(
                name=name,
                rank=rank,
                wall_s=BEGUN_S + at_s + self.ahead_s.get(rank, 0.0),
                monotonic_s=at_s,
                seconds=seconds,
                step=step,
                attempt=attempt,
                fields=how,
            )
        )

    def all(self, name: str, at_s: float, seconds: float | None = None, **how: Any) -> None:
        """Let all ranks tell the same."""
        for rank in self.logs:
            self.one(rank, name, at_s, seconds, **how)

    def restore(self, at_s: float, step: int | None) -> None:
        """Restore in 9 s, or start fresh."""
        if step is None:
            self.all("restore.done", at_s, 0.2, fresh=True)
            return
        for n, lap in enumerate(("find", "compare", "read", "agree", "apply")):
            self.all(f"restore.{lap}", at_s + n, 5.0 if lap == "read" else 1.0, step=step)
        self.all("restore.done", at_s, 9.0, step=step, fresh=False)

    def save(
        self,
        step: int,
        at_s: float,
        *,
        persist_s: float = 20.0,
        slow: dict[int, float] | None = None,
        error: str | None = None,
        is_cut: bool = False,
    ) -> str:
        """Save in the background: 0.4 s of plan, 2 s of copy; return the attempt."""
        attempt, slow, chance = f"attempt-{step}-{self.id}", slow or {}, random.Random(step)
        how = {"step": step, "attempt": attempt}
        durable = {}
        for rank in range(self.world_size):
            copy_s = 2.0 + 0.2 * chance.random()
            took_s = copy_s + persist_s * (1 + 0.1 * chance.random()) + slow.get(rank, 0.0)
            self.one(rank, "save.wait", at_s, 0.05, **how)
            self.one(rank, "save.plan", at_s + 0.05, 0.35, **how)
            self.one(rank, "save.stall", at_s, 0.4 + copy_s, mode="async", **how)
            self.one(rank, "save.copy", at_s + 0.4, copy_s, bytes=SHARD_BYTES, **how)
            if is_cut and rank in slow:
                continue
            self.one(rank, "save.persist", at_s + 0.4, took_s, bytes=SHARD_BYTES, **how)
            durable[rank] = at_s + 0.4 + took_s
        if is_cut:
            return attempt
        last = max(durable.values())
        for rank, durable_s in durable.items():
            wait_s = last - durable_s + (0.0 if rank == 0 else 0.3)
            self.one(rank, "save.seal", durable_s, wait_s, **how)
            if rank == 0:
                self.one(rank, "save.publish", last, 0.3, **how)
            if error is not None:
                self.one(rank, "save.failed", last + 0.3, error=error, **how)
            else:
                size = self.world_size * SHARD_BYTES
                self.one(rank, "save.committed", last + 0.3, bytes=size, mode="async", **how)
        return attempt

    def steps(self, first: int, last: int, at_s: float, step_s: float) -> None:
        """Say where the run is, every tenth step."""
        for step in range(first, last + 1, 10):
            self.one(0, "progress", at_s + (step - first) * step_s, step=step)

    def end(self, at_s: float | None = None, step: int = 0) -> None:
        """Put all on storage; ``None``: killed, with nothing said."""
        if at_s is not None:
            self.all("run.ended", at_s, step=step)
        for log in self.logs.values():
            log.flush()


def tell_run(root: Store, world_size: int = 8) -> None:
    """A run of an hour: killed once, gone back once, one save failed, one rank slow now and then."""
    first = Told(root, 0, world_size, 0.0)
    first.restore(1.0, None)
    first.steps(0, 430, 2.0, 2.0)
    attempts = [first.save(step, 2.0 + 2 * step) for step in (100, 200)]
    first.save(300, 602.0, slow={3: 25.0})
    first.save(400, 802.0, slow={1: 0.0, 5: 0.0}, is_cut=True)
    first.one(
        0, "retention.deleted", 700.0, step=100, attempt=attempts[0], bytes=0, what="checkpoint"
    )
    first.end()
    second = Told(root, 1, world_size, 1000.0)
    second.restore(1005.0, 300)
    second.steps(300, 700, 1015.0, 2.0)
    second.save(400, 1215.0)
    error = "saving step 500 failed, nothing was committed: rank 2: no space left on device"
    second.save(500, 1415.0, error=error)
    second.save(600, 1615.0, slow={6 % world_size: 12.0})
    second.all("spike", 1815.0, step=700, reason="loss 41.2, usual 2.31", action="roll_back")
    second.all("rollback", 1815.0, 10.0, step=600, from_step=700, reason="loss 41.2, usual 2.31")
    second.steps(600, 1200, 1825.0, 2.0)
    for step in range(700, 1201, 100):
        second.save(step, 1825.0 + 2 * (step - 600), slow={step // 100 % world_size: step / 100})
    second.end(3060.0, step=1200)
