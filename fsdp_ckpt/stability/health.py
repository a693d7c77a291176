"""When a checkpoint is good: training went on well for a while after it.

Invariant: a checkpoint whose steps after it were suspicious has to see them over first.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Candidate", "Candidates"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint that is not judged yet.

    Args:
        step: Training step.
        attempt: Id of its save.
    """

    step: int
    attempt: str


class Candidates:
    """Checkpoints on their way to good.

    Args:
        healthy_steps: Healthy steps in a row that it takes.
    """

    def __init__(self, healthy_steps: int) -> None:
        self._healthy_steps = healthy_steps
        self._waiting: dict[Candidate, int] = {}

    def add(self, candidate: Candidate) -> None:
        """Take in a checkpoint when it is committed, and one that the run was resumed from."""
        self._waiting.setdefault(candidate, 0)

    def observe(self, step: int, *, is_healthy: bool) -> list[Candidate]:
        """Count a step; return the checkpoints that are good by it, oldest first.

        Args:
            step: Its number; checkpoints of it or of later ones do not count it.
            is_healthy: As the detector says. A suspicious one starts every count anew.
        """
        for candidate, count in self._waiting.items():
            if not is_healthy:
                self._waiting[candidate] = 0
            elif step > candidate.step:
                self._waiting[candidate] = count + 1
        good = [c for c, count in self._waiting.items() if count >= self._healthy_steps]
        for candidate in good:
            del self._waiting[candidate]
        return sorted(good, key=lambda c: c.step)

    def drop_after(self, step: int) -> None:
        """Forget the checkpoints beyond a step that the run goes back to."""
        self._waiting = {c: n for c, n in self._waiting.items() if c.step <= step}
