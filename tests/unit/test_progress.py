"""Counts of a run, and the data cursor that follows them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fsdp_ckpt.errors import MismatchError
from fsdp_ckpt.state.data import ResumableSampler
from fsdp_ckpt.state.progress import Progress

STATE = {"step": 7, "epoch": 2, "samples": 448, "tokens": 9000}


def make_progress() -> Progress:
    progress = Progress()
    progress.load_state_dict(STATE)
    return progress


def test_counts_start_at_zero_and_add_up() -> None:
    """Every report adds its counts, one step by default."""
    progress = Progress()
    assert progress.state_dict() == {"step": 0, "epoch": 0, "samples": 0, "tokens": 0}
    progress.advance(samples=64, tokens=1000)
    progress.advance(samples=32, steps=3)
    progress.advance()
    progress.next_epoch()
    assert progress.state_dict() == {"step": 5, "epoch": 1, "samples": 96, "tokens": 1000}


def test_state_round_trips() -> None:
    """A loaded state is the saved one."""
    assert make_progress().state_dict() == STATE


def test_counts_stay_plain_integers() -> None:
    """Integers of other libraries become ints, so that the state stays loadable."""
    progress = Progress()
    progress.advance(samples=np.int64(4), tokens=np.uint8(200))  # type: ignore[arg-type]
    progress.advance(tokens=np.uint8(200))  # type: ignore[arg-type]
    assert progress.state_dict() == {"step": 2, "epoch": 0, "samples": 4, "tokens": 400}
    assert {type(value) for value in progress.state_dict().values()} == {int}
    with pytest.raises(TypeError):
        progress.advance(samples=1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", ["samples", "tokens", "steps"])
def test_negative_counts_are_refused(count: str) -> None:
    """A negative count is refused by name and changes nothing, not even the cursor."""
    progress = make_progress()
    sampler = ResumableSampler(100)
    progress.attach(sampler)
    with pytest.raises(MismatchError, match=f"{count} -1"):
        progress.advance(**{"samples": 8, count: -1})
    assert progress.state_dict() == STATE
    assert sampler.cursor == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": None}, "step is missing"),
        ({"loss": 1}, "loss is unknown"),
        ({"step": True}, "step is of type bool"),
        ({"tokens": 1.0}, "tokens is of type float"),
        ({"samples": -1}, "samples is -1"),
    ],
)
def test_malformed_states_are_refused(change: dict[str, Any], words: str) -> None:
    """Missing, unknown, mistyped and negative counts are named, and nothing is taken over."""
    fields = {"step": 1, "epoch": 0, "samples": 1, "tokens": 1} | change
    state = {name: value for name, value in fields.items() if value is not None}
    progress = make_progress()
    with pytest.raises(MismatchError, match=words):
        progress.load_state_dict(state)
    assert progress.state_dict() == STATE


def test_all_problems_are_named_at_once() -> None:
    """One error tells everything that is wrong with a state."""
    with pytest.raises(MismatchError) as caught:
        Progress().load_state_dict({"step": "1", "loss": 1})
    for words in ("epoch is missing", "samples is missing", "loss is unknown", "type str"):
        assert words in str(caught.value)


def test_the_attached_cursor_follows() -> None:
    """Reported samples move the cursor, a new epoch sets it to that epoch's start."""
    progress = Progress()
    sampler = ResumableSampler(100, rank=1, world_size=4)
    progress.attach(sampler)
    progress.advance(samples=32)
    progress.advance(samples=32)
    assert (sampler.epoch, sampler.cursor) == (0, 64)
    progress.next_epoch()
    assert (sampler.epoch, sampler.cursor) == (1, 0)
    progress.advance(samples=8)
    assert (sampler.cursor, progress.samples) == (8, 72)


def test_a_refusing_cursor_keeps_progress_where_it_was() -> None:
    """Progress and cursor move together or not at all."""
    progress = Progress()
    sampler = ResumableSampler(10)
    progress.attach(sampler)
    progress.advance(samples=8)
    with pytest.raises(MismatchError, match="cannot advance by 3"):
        progress.advance(samples=3, tokens=5)
    assert progress.state_dict() == {"step": 1, "epoch": 0, "samples": 8, "tokens": 0}
    assert sampler.cursor == 8


def test_a_later_cursor_replaces_the_earlier_one() -> None:
    """Only the cursor attached last follows."""
    progress = Progress()
    first, second = ResumableSampler(10), ResumableSampler(10)
    progress.attach(first)
    progress.attach(second)
    progress.advance(samples=2)
    assert (first.cursor, second.cursor) == (0, 2)
