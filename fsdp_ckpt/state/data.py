"""The data cursor: which samples of the epoch training has consumed.

One epoch is one order of sample indices, the same on all ranks and for any number of them. The
cursor is a position in that order, counted over all ranks:

    order    | consumed ........ | r0 r1 r2 r0 r1 r2 | r0 r1 r2 ...
             0                cursor        cursor + batch * world

Invariant: a step of ``batch`` samples per rank consumes exactly positions ``[cursor, cursor +
batch * world)``, so the rest of the epoch is exact on any other world size. What loader workers
have prefetched does not count. Positions that are skipped, after a rollback, are passed over as if the
order did not hold them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from fsdp_ckpt.errors import MismatchError
from fsdp_ckpt.state.progress import field_problems
from fsdp_ckpt.state.rng import mix_words

__all__ = ["ResumableSampler"]

# Indices turned into Python ints at a time: bounds memory, hides the cost of a tensor operation.
_BLOCK_SAMPLES = 16_384


class ResumableSampler(Sampler[int]):
    """Sample indices of one rank, from the cursor to the end of the epoch.

    An iterator keeps the epoch and cursor it began with: make a new one after `set_epoch`,
    `load_state_dict` or `skip`. Ranks which see the same data (tensor or pipeline parallel) give the same
    ``rank``.

    Args:
        num_samples: Samples in the dataset.
        rank: Data-parallel rank; by default this process's rank, 0 without a process group.
        world_size: Data-parallel ranks; by default all processes, 1 without a process group.
        shuffle: A new permutation each epoch; otherwise the dataset's order.
        seed: Any integer, the same on all ranks.
        tail: What becomes of the last samples when they do not go round: ``"drop"`` leaves them
            out, ``"pad"`` repeats the first ones of the epoch, so that all ranks get equally many.

    Attributes:
        epoch: Index of the current epoch.
        cursor: Samples of this epoch consumed by all ranks together.

    Raises:
        MismatchError: No samples, a rank outside the world, an unknown tail.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        tail: Literal["drop", "pad"] = "drop",
    ) -> None:
        grouped = dist.is_available() and dist.is_initialized()
        if rank is None:
            rank = dist.get_rank() if grouped else 0
        if world_size is None:
            world_size = dist.get_world_size() if grouped else 1
        self.rank = rank
        self.world_size = world_size
        self.num_samples = operator.index(num_samples)
        self.shuffle = bool(shuffle)
        self.seed = operator.index(seed)
        self.tail = tail
        self.epoch = 0
        self.cursor = 0
        self._skipped: tuple[tuple[int, int, int], ...] = ()
        self._cached_order: tuple[int, torch.Tensor] | None = None
        if self.num_samples < 1:
            raise MismatchError(f"num_samples is {num_samples}: a sampler needs at least one")
        if not 0 <= self.rank < self.world_size:
            raise MismatchError(
                f"rank {self.rank} is outside a world of {self.world_size}: give both rank and "
                "world_size of the data-parallel group"
            )
        if tail not in ("drop", "pad"):
            raise MismatchError(f"tail is {tail!r}: expected 'drop' or 'pad'")

    def __len__(self) -> int:
        """Return how many indices this rank has left; equal on all ranks."""
        repeats = self.world_size - 1 if self.tail == "pad" else 0
        return (_total(self._ranges_from(self.cursor)) + repeats) // self.world_size

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's indices from the cursor on; skipped ones cost nothing."""
        num_rounds = len(self)
        ranges, whole = self._ranges_from(self.cursor), self._ranges_from(0)
        while _total(ranges) < num_rounds * self.world_size:
            ranges = [*ranges, *whole]  # what is repeated at the end
        taken = range(self.rank, num_rounds * self.world_size, self.world_size)
        return _walk(self._order() if self.shuffle else None, ranges, taken)

    def advance(self, samples: int) -> None:
        """Count ``samples`` as consumed, over all ranks; call it on every rank.

        Raises:
            MismatchError: ``samples`` is negative or more than the epoch has left; the cursor has
                not moved.
        """
        samples = operator.index(samples)
        left = self._ranges_from(self.cursor)
        # Rounds are full on every rank, so the last one of "pad" counts its repeats.
        if samples < 0 or samples > max(_total(left), len(self) * self.world_size):
            raise MismatchError(
                f"data cursor at {self.cursor} of {self.num_samples} in epoch {self.epoch} cannot "
                f"advance by {samples}: report what all ranks really consumed (the last batch of "
                "an epoch may be short, drop_last=True avoids it), and begin the next epoch"
            )
        if samples >= _total(left):
            self.cursor = self.num_samples
        elif samples > 0:
            self.cursor = int(_positions(left, range(samples - 1, samples))[0]) + 1

    def skip(self, windows: Iterable[tuple[int, int, int]]) -> None:
        """Leave data out from now on, and nothing else: replaces what an earlier call said.

        Not part of the state: it is what the run has recorded when it went back, and is said again after
        every restore. Call it on every rank with the same windows.

        Args:
            windows: (epoch, start, stop): positions in that epoch's order, counted as the cursor is.
        """
        self._skipped = tuple(sorted(windows))

    def _ranges_from(self, start: int) -> list[range]:
        """Return the positions of this epoch from ``start`` on that are not skipped."""
        ranges = []
        for epoch, first, stop in self._skipped:
            if epoch == self.epoch and start < stop:
                if start < min(first, self.num_samples):
                    ranges.append(range(start, min(first, self.num_samples)))
                start = stop
        if start < self.num_samples:
            ranges.append(range(start, self.num_samples))
        return ranges

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of ``epoch``; stay at the cursor if this is the current epoch.

        Raises:
            MismatchError: ``epoch`` is negative.
        """
        epoch = operator.index(epoch)
        if epoch < 0:
            raise MismatchError(f"epoch is {epoch}: epochs count from 0")
        if epoch != self.epoch:
            self.epoch = epoch
            self.cursor = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position and what the order depends on; the same on every rank."""
        return {
            "epoch": self.epoch,
            "cursor": self.cursor,
            "seed": self.seed,
            "num_samples": self.num_samples,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of `state_dict`, on any rank of any world size.

        Raises:
            MismatchError: Another dataset size, seed or order, all named; fields that are missing,
                unknown or of another type; a position outside the epoch. Nothing has changed.
        """
        own = self.state_dict()
        problems = field_problems(state, {name: type(value) for name, value in own.items()})
        if not problems:
            problems = [
                f"{name} was {state[name]}, now {own[name]}"
                for name in ("num_samples", "seed", "shuffle")
                if state[name] != own[name]
            ]
            if state["epoch"] < 0:
                problems.append(f"epoch is {state['epoch']}, expected 0 or more")
            if not 0 <= state["cursor"] <= state["num_samples"]:
                problems.append(f"cursor is {state['cursor']}, outside the epoch")
        if problems:
            raise MismatchError(
                f"data cursor does not load: {'; '.join(problems)}: use the dataset and sampler "
                "options of the saved run, or leave the cursor out"
            )
        self.epoch, self.cursor = state["epoch"], state["cursor"]

    def _order(self) -> torch.Tensor:
        """Return this epoch's permutation, int64, shape (num_samples,)."""
        if self._cached_order is None or self._cached_order[0] != self.epoch:
            generator = torch.Generator(device="cpu")
            generator.manual_seed(mix_words(self.seed, self.epoch))
            # The device is named because torch.set_default_device must not move it.
            order = torch.randperm(self.num_samples, generator=generator, device="cpu")
            self._cached_order = (self.epoch, order)
        return self._cached_order[1]


def _total(ranges: list[range]) -> int:
    return sum(map(len, ranges))


def _positions(ranges: list[range], taken: range) -> torch.Tensor:
    """Return the positions that come as number ``taken`` of those in ``ranges``, int64."""
    numbers = torch.arange(taken.start, taken.stop, taken.step, device="cpu")
    ends = list(accumulate(map(len, ranges)))
    which = torch.searchsorted(torch.tensor(ends, device="cpu"), numbers, right=True)
    # A range's first position, less how many come before it.
    shifts = [r.start + len(r) - end for r, end in zip(ranges, ends, strict=True)]
    return numbers + torch.tensor(shifts, device="cpu")[which]


def _walk(order: torch.Tensor | None, ranges: list[range], taken: range) -> Iterator[int]:
    """Yield the indices that ``order`` has at number ``taken`` of the positions in ``ranges``."""
    for first in range(0, len(taken), _BLOCK_SAMPLES):
        picked = _positions(ranges, taken[first : first + _BLOCK_SAMPLES])
        yield from (picked if order is None else order[picked]).tolist()
