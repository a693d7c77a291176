"""Saves and loads of all peers, round by round, on one rank.

    prepare ─> start ──> (stall) ─> wait ──> saved ─> fsync ──> on disk ─> spoil ─> load ──> compare digests

Invariant: no time is noted of a load that has not brought every bit of every tensor back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from bench_parts.clock import Clock, Spans, run_rounds
from bench_parts.peers.grounds import Ground
from bench_parts.peers.peer import Peer
from bench_parts.peers.state import PeerState

__all__ = ["Found", "PeerRounds"]

Make = Callable[[str, PeerState, str], Peer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a rank has found.

    Args:
        num_bytes: Of its part of the state.
        spans: By ``NAME: WHAT``.
        durable: By peer; of rank 0.
        errors: By peer that does not run, or loads wrong values; the same on all ranks.
    """

    num_bytes: int
    spans: Spans = field(default_factory=dict)
    durable: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


class PeerRounds:
    """This rank's part; every method is called by every rank.

    Args:
        state: What all of them move.
        ground: Where to.
        make: Makes a peer by its name.
    """

    def __init__(self, state: PeerState, ground: Ground, make: Make) -> None:
        self.clock = Clock()
        self.state = state
        self.ground = ground
        self._make = make
        self._peers: dict[str, Peer] = {}
        self._durable: dict[str, str] = {}
        self._errors: dict[str, str] = {}

    def run(
        self, names: Sequence[str], num_rounds: int, limits: Sequence[Callable[[], None]] = ()
    ) -> Found:
        """Run every peer once to see that it works, then all that do, round by round."""
        methods = [*limits, *(partial(self._cycle, name) for name in names)]
        spans = run_rounds(self.clock, methods, num_rounds)
        for peer in self._peers.values():
            peer.close()
        return Found(
            num_bytes=self.state.num_bytes,
            spans=spans,
            durable=self._durable,
            errors=self._errors,
        )

    def _cycle(self, name: str) -> None:
        if not self.clock.warming:
            if name not in self._errors:
                self._save_and_load(name)
            return
        error = ""
        try:
            self._save_and_load(name)
        except (Exception, CheckpointException) as e:
            error = f"{type(e).__name__}: {e}".strip().splitlines()[0]
        errors: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(errors, error)
        if any(errors):
            rank = next(rank for rank, found in enumerate(errors) if found)
            self._errors[name] = f"{errors[rank]} (rank {rank})"

    def _save_and_load(self, name: str) -> None:
        self.ground.prepare(name)
        if name not in self._peers:
            self._peers[name] = self._make(name, self.state, self.ground.place(name))
        peer = self._peers[name]
        start = self.clock.start()
        wait = peer.start()
        if peer.in_background:
            self.clock.stop(f"{name}: stall", start)
        wait()
        self.clock.stop(f"{name}: saved", start)
        if self.clock.warming:
            self._durable[name] = self.ground.judge(name)
        self.ground.settle(name)
        self.clock.stop(f"{name}: on disk", start)
        self.state.spoil()
        self.ground.forget(name)
        start = self.clock.start()
        peer.load()
        self.clock.stop(f"{name}: load", start)
        self._compare()

    def _compare(self) -> None:
        """Compare what was loaded, on all ranks; what comes next saves what is there now."""
        wrong: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(wrong, self.state.num_wrong())
        if any(wrong):
            self.state.fill()
            raise ValueError(f"loads wrong values: {sum(wrong)} tensors of all ranks")
