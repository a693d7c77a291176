"""What the coordinator knows of a run: how it has been doing, what saves cost, how often it was interrupted.

Invariant: one rank's clock and one detector for all; it goes into every checkpoint and comes back with it, so
that a run which goes on knows what was usual, and how long it lives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fsdp_ckpt.errors import MismatchError, describe
from fsdp_ckpt.stability.health import Candidate, Candidates
from fsdp_ckpt.stability.interval import learned_mtbf
from fsdp_ckpt.stability.save_costs import SaveCosts
from fsdp_ckpt.stability.save_policy import SavePolicy
from fsdp_ckpt.stability.spike_detector import SpikeDetector
from fsdp_ckpt.stability.spike_policy import SpikeDecision, SpikePolicy

__all__ = ["RunWatch"]


class RunWatch:
    """Watches a run.

    Args:
        spikes: What counts as a spike; ``None`` judges nothing.
        on_good: Told of each checkpoint that has become good.
        clock: Seconds that only go forward.
    """

    def __init__(
        self,
        spikes: SpikePolicy | None,
        on_good: Callable[[Candidate], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._detector = None if spikes is None else SpikeDetector(spikes)
        self._candidates = Candidates(spikes.healthy_steps if spikes else 1)
        self._on_good = on_good
        self.num_rollbacks: Callable[[], int] = int  # how often the run has gone back at this place
        self._clock = clock
        self._costs = SaveCosts()
        self._begun_s = self._saved_s = self._stepped_s = clock()
        self._uptime_s = 0.0  # before this life
        self._num_failures = 0
        self.good: dict[str, int] = {}  # attempt -> step

    # --- spikes and health ---

    def judge(
        self, step: int, losses: Sequence[float | None], norms: Sequence[float | None]
    ) -> SpikeDecision | None:
        """Judge one step by what all ranks say; return what to do, if anything.

        Raises:
            MismatchError: A rank has said no loss, or only some ranks have said a gradient norm.
        """
        if self._detector is None:
            return None
        if any(loss is None for loss in losses):
            raise MismatchError(
                f"step {step}: a spike policy, and no loss on rank {list(losses).index(None)}; call "
                "after_step(loss=...) on every rank",
                step=step,
            )
        known = [norm for norm in norms if norm is not None]
        decision = self._detector.observe(
            step,
            [loss for loss in losses if loss is not None],
            known,
            num_rollbacks=self.num_rollbacks(),
        )
        for candidate in self._candidates.observe(step, is_healthy=decision.is_healthy):
            self.good[candidate.attempt] = candidate.step
            self._on_good(candidate)
        return None if decision.action == "none" else decision

    def add_candidate(self, step: int, attempt: str) -> None:
        """Take in a checkpoint that is being saved, or that the run goes on from."""
        self._candidates.add(Candidate(step, attempt))

    def gone_back(self, step: int) -> None:
        """Forget the checkpoints beyond a step."""
        self._candidates.drop_after(step)
        self.good = {attempt: s for attempt, s in self.good.items() if s <= step}

    # --- saves and time ---

    @property
    def since_save_s(self) -> float:
        """Seconds since the last save took its last bit of training time, or since training began."""
        return self._clock() - self._saved_s

    def stepped(self) -> None:
        """Note that a step has been made."""
        now = self._clock()
        self._costs.step(now - self._stepped_s)
        self._stepped_s = now

    def saved(self, begun_s: float) -> None:
        """Note a save that began at ``begun_s`` of the clock, and has given training back now."""
        self._saved_s = self._stepped_s = self._clock()
        self._costs.begin(self._saved_s, self._saved_s - begun_s)

    def durable(self) -> None:
        """Note that no save is being written any more."""
        self._costs.end(self._clock())

    def now_s(self) -> float:
        """Return the time by its clock."""
        return self._clock()

    def interval_s(self, policy: SavePolicy) -> float | None:
        """Return the interval of ``auto``, in seconds, where it is known."""
        mtbf_s = learned_mtbf(self._num_failures, self._uptime())
        return policy.interval_s(self._costs.cost_s, mtbf_s, self._costs.persist_s)

    def _uptime(self) -> float:
        return self._uptime_s + self._clock() - self._begun_s

    # --- in the checkpoint ---

    def facts(self, *, is_last: bool) -> dict[str, Any]:
        """Return what to remember; ``is_last`` where the run ends with this save, by its own will."""
        facts: dict[str, Any] = {
            "uptime_s": self._uptime(),
            "interruptions": self._num_failures,
            "ended": is_last,
        }
        if self._detector is not None:
            facts["detector"] = self._detector.state_dict()
        return facts

    def remember(self, facts: Mapping[str, Any], *, is_new_life: bool) -> str | None:
        """Take over what a checkpoint says; return what of it could not be understood.

        Args:
            facts: As saved; empty where nothing was watched.
            is_new_life: The run was started again, rather than gone back while it ran.
        """
        if is_new_life:
            self._uptime_s = _number(facts.get("uptime_s"))
            self._num_failures = int(_number(facts.get("interruptions")))
            if facts and not facts.get("ended"):
                self._num_failures += 1
            self._begun_s = self._saved_s = self._stepped_s = self._clock()
        if self._detector is not None and "detector" in facts:
            try:
                self._detector.load_state_dict(facts["detector"])
            except MismatchError as e:
                return describe(e)
        return None


def _number(value: Any) -> float:
    return float(value) if type(value) in (int, float) and value >= 0 else 0.0
