"""Data that a rollback skips: passed over as if the order did not hold it, and nothing else."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_ckpt import MismatchError, Progress, ResumableSampler
from fsdp_ckpt.state.data_trail import DataTrail

NUM_SAMPLES = 23
WINDOWS = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 25), st.integers(1, 9)).map(
        lambda w: (w[0], w[1], w[1] + w[2])
    ),
    max_size=4,
)


def sampler(
    rank: int = 0, world_size: int = 1, tail: Literal["drop", "pad"] = "drop"
) -> ResumableSampler:
    return ResumableSampler(NUM_SAMPLES, rank=rank, world_size=world_size, seed=4, tail=tail)


def left_of(epoch: int, windows: list[tuple[int, int, int]], start: int = 0) -> list[int]:
    """Return the positions that are left, the slow way."""
    return [
        p
        for p in range(start, NUM_SAMPLES)
        if not any(e == epoch and a <= p < b for e, a, b in windows)
    ]


@given(WINDOWS, st.integers(1, 4), st.integers(1, 3), st.integers(0, 5))
def test_ranks_share_what_is_left(
    windows: list[tuple[int, int, int]], world_size: int, batch: int, num_steps: int
) -> None:
    """For any windows and any number of ranks: each sample that is left once, in order, and no other."""
    order, left = list(sampler()), left_of(0, windows)
    ranks = [sampler(r, world_size) for r in range(world_size)]
    for each in ranks:
        each.skip(windows)
    step = batch * world_size
    num_steps = min(num_steps, len(left) // step)
    for done in range(num_steps):
        iterators = [iter(each) for each in ranks]
        seen = [[next(it) for _ in range(batch)] for it in iterators]
        due = [order[p] for p in left[done * step : (done + 1) * step]]
        assert [ids[i] for i in range(batch) for ids in seen] == due
        for each in ranks:
            each.advance(step)
    rest = [order[p] for p in left[num_steps * step :]]
    num_rounds = len(rest) // world_size
    assert [len(each) for each in ranks] == [num_rounds] * world_size
    for rank, each in enumerate(ranks):
        assert list(each) == rest[rank::world_size][:num_rounds]


@given(WINDOWS, st.integers(1, 5), st.integers(0, 22))
def test_what_is_repeated_at_the_end_is_not_skipped_data(
    windows: list[tuple[int, int, int]], world_size: int, cursor: int
) -> None:
    """Padded epochs end with the first samples that are left, the same number on every rank."""
    order = list(sampler())
    ranks = [sampler(r, world_size, "pad") for r in range(world_size)]
    for each in ranks:
        each.cursor = cursor
        each.skip(windows)
    left, whole = left_of(0, windows, cursor), left_of(0, windows)
    missing = -len(left) % world_size
    padded = [*left, *(whole * world_size)[:missing]] if left else []
    for rank, each in enumerate(ranks):
        assert list(each) == [order[p] for p in padded[rank::world_size]]
        each.advance(len(padded))
        assert each.cursor == NUM_SAMPLES or not padded


def test_windows_are_of_their_epoch_alone() -> None:
    """The next epoch's order is its own; what an earlier call said is replaced."""
    each = sampler()
    whole = list(each)
    each.skip([(1, 0, 5), (0, 3, 4)])
    assert list(each) == [*whole[:3], *whole[4:]]
    each.set_epoch(1)
    assert len(each) == NUM_SAMPLES - 5
    each.skip([])
    assert len(each) == NUM_SAMPLES


def test_a_cursor_inside_a_window_goes_on_behind_it() -> None:
    """As after a restore of a checkpoint from the middle of what was found to be bad later."""
    each = sampler()
    order = list(each)
    each.cursor = 6
    each.skip([(0, 4, 10), (0, 5, 7), (0, 21, 40)])
    assert list(each) == order[10:21]
    each.advance(11)
    assert each.cursor == NUM_SAMPLES
    with pytest.raises(MismatchError, match="cannot advance by 1"):
        each.advance(1)


def test_skipped_windows_are_no_state() -> None:
    """A checkpoint's cursor loads wherever it was saved; the windows are said by whoever knows of them."""
    each = sampler()
    before = set(each.state_dict())
    each.skip([(0, 0, 3)])
    assert set(each.state_dict()) == before


def test_the_trail_knows_what_steps_have_read() -> None:
    """Also over an epoch's end, for steps yet to come, and for several steps reported at once."""
    each, progress = sampler(), Progress()
    progress.attach(each)
    trail = DataTrail(each, 0)

    def steps(num: int, samples: int = 4) -> None:
        for _ in range(num):
            progress.advance(samples=samples)
            trail.note(progress.step)

    steps(3)
    assert trail.windows(2, 3) == [(0, 4, 8)]
    assert trail.windows(0, 3) == [(0, 0, 4), (0, 4, 8)]
    assert trail.windows(3, 6) == [(0, 8, 12), (0, 12, 20)]
    assert trail.windows(3, 99) == [(0, 8, 12), (0, 12, NUM_SAMPLES)]
    steps(2)
    progress.next_epoch()
    steps(1)
    assert trail.windows(5, 7) == [(0, 16, 20), (0, 20, NUM_SAMPLES), (1, 0, 4)]
    progress.advance(samples=8, steps=2)
    trail.note(progress.step)
    assert trail.windows(7, 8) == []  # of two steps that came together, neither is known alone
    assert trail.windows(7, 9) == [(1, 4, 12)]


def test_a_trail_that_has_just_begun_knows_nothing_before() -> None:
    """What was read before a restart is not taken for what the steps before it have read."""
    each = sampler()
    each.cursor = 8
    trail = DataTrail(each, 2)
    assert trail.windows(0, 3) == []
    each.advance(4)
    trail.note(3)
    assert trail.windows(0, 4) == [(0, 8, 12)]
