"""Which data each of the last steps has read: what a rollback is to skip, in positions.

Invariant: positions are the sampler's cursor, the same on all ranks; nothing is known from before the trail
began.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

from fsdp_ckpt.state.data import ResumableSampler

__all__ = ["DataTrail"]

# More than detection takes, however patient it is.
MAX_STEPS = 4096


@dataclass(frozen=True, slots=True)
class _Mark:
    step: int
    epoch: int
    cursor: int


class DataTrail:
    """Follows a sampler, step by step.

    Args:
        sampler: Whose cursor.
        step: Steps done so far.
    """

    def __init__(self, sampler: ResumableSampler, step: int) -> None:
        self._sampler = sampler
        self._marks: deque[_Mark] = deque(maxlen=MAX_STEPS)
        self.note(step)

    def note(self, step: int) -> None:
        """Note where the data stands after a step."""
        self._marks.append(_Mark(step, self._sampler.epoch, self._sampler.cursor))

    def windows(self, first: int, stop: int) -> list[tuple[int, int, int]]:
        """Return what steps ``first`` to ``stop`` - 1 have read, or will have: (epoch, start, stop).

        What is yet to be read is taken to be as much as the last step read, up to the end of the epoch.
        """
        marks = list(self._marks)
        before = [m for m in marks if m.step < first][-1:] or marks[:1]
        inside = [m for m in marks if before[0].step < m.step < stop]
        found = [w for a, b in pairwise([*before, *inside]) for w in self._between(a, b)]
        last = marks[-1]
        num_ahead = stop - 1 - last.step
        if num_ahead > 0 and len(marks) > 1:
            size = self._size(marks[-2], last)
            end = min(last.cursor + num_ahead * size, self._sampler.num_samples)
            if end > last.cursor:
                found.append((last.epoch, last.cursor, end))
        return found

    def _size(self, before: _Mark, last: _Mark) -> int:
        """Return how far one step goes."""
        read = sum(stop - start for _, start, stop in self._between(before, last))
        return read // max(last.step - before.step, 1)

    def _between(self, before: _Mark, after: _Mark) -> list[tuple[int, int, int]]:
        found, start = [], before.cursor
        for epoch in range(before.epoch, after.epoch):
            found.append((epoch, start, self._sampler.num_samples))
            start = 0
        found.append((after.epoch, start, after.cursor))
        return [w for w in found if w[1] < w[2]]
