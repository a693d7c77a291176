"""Live memory is swapped with what is read for it, and comes back to the bit."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fsdp_ckpt import CheckpointManager, CorruptCheckpointError, SaveOptions, TrainState
from fsdp_ckpt.plan.image import BLOCK_BYTES
from fsdp_ckpt.snapshot.exchange import BETWEEN_BYTES, Exchange, Move, extent_of, overlapping

NUM_BYTES = 3 * BETWEEN_BYTES + 1000
cuts = st.lists(st.integers(0, NUM_BYTES), max_size=8).map(lambda c: sorted({0, NUM_BYTES, *c}))


def noise(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (NUM_BYTES,), dtype=torch.uint8, generator=generator)


def exchange_of(live: torch.Tensor, targets: list[int], *, holes: int) -> Exchange:
    """Every target but each ``holes``-th is one that a move goes to."""
    parts = [p for i, p in enumerate(itertools.pairwise(targets)) if i % holes]
    return Exchange({0: [Move(start=a, target=live[a:b]) for a, b in parts if a < b]})


@settings(deadline=None, max_examples=50)
@given(cuts, cuts, st.integers(2, 4))
def test_what_arrives_is_live_and_what_was_live_comes_back(
    targets: list[int], arrivals: list[int], holes: int
) -> None:
    """However both are cut: each byte goes where its move says, the rest stays, and undo is exact."""
    before, arriving = noise(1), noise(2)
    live, image = before.clone(), bytearray(arriving.numpy().tobytes())
    exchange = exchange_of(live, targets, holes=holes)
    for a, b in itertools.pairwise(arrivals):
        exchange.take(0, a, memoryview(image)[a:b])
        exchange.take(1, a, memoryview(image)[a:b])  # of a file that nothing is wanted of
    moved = torch.zeros(NUM_BYTES, dtype=torch.bool)
    for i, (a, b) in enumerate(itertools.pairwise(targets)):
        moved[a:b] = bool(i % holes)
    assert torch.equal(live, torch.where(moved, arriving, before))
    exchange.undo()
    assert torch.equal(live, before)
    assert image == arriving.numpy().tobytes()
    exchange.undo()
    assert torch.equal(live, before)


def test_threads_take_at_once() -> None:
    """Parts that two threads bring at the same time do not meet in the memory between."""
    before, arriving = noise(1), noise(2)
    live, image = before.clone(), memoryview(bytearray(arriving.numpy().tobytes()))
    exchange = Exchange({0: [Move(start=0, target=live)]})
    starts = range(0, NUM_BYTES, 4096)
    together = threading.Barrier(2)

    def take(mine: Iterable[int]) -> None:
        together.wait(timeout=250)
        for at in mine:
            exchange.take(0, at, image[at : at + 4096])

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(take, (starts[::2], starts[1::2])))
    assert torch.equal(live, arriving)
    exchange.undo()
    assert torch.equal(live, before)


def test_what_is_kept_is_a_change_in_place() -> None:
    """After ``keep`` there is no way back, and autograd refuses a graph that saw the old values."""
    weight = nn.Parameter(torch.ones(4))
    loss = (weight * weight).sum()
    image = memoryview(bytearray(torch.full((4,), 3.0).numpy().tobytes()))
    exchange = Exchange({0: [Move(start=0, target=weight.detach())]})
    exchange.take(0, 0, image)
    exchange.keep()
    exchange.undo()
    assert weight.tolist() == [3.0] * 4
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@given(st.lists(st.tuples(st.integers(-9, 30), st.integers(0, 9)), max_size=8))
def test_ranges_that_meet_are_found(drawn: list[tuple[int, int]]) -> None:
    """As comparing each with each other finds."""
    ranges = [(a, a + n) for a, n in drawn]
    sets = [set(range(*r)) for r in ranges]
    met = {
        i
        for i, s in enumerate(sets)
        for j, other in enumerate(sets)
        if i != j and not s.isdisjoint(other)
    }
    assert overlapping(ranges) == met


def test_extents_are_of_the_elements() -> None:
    """From the first element to the last, whatever the strides are; nothing where there are none."""
    base = torch.zeros(6, 5)
    start = base.data_ptr()
    assert extent_of(base) == (start, start + 120)
    assert extent_of(base[:, 1:3]) == (start + 4, start + 4 + 4 * (5 * 5 + 2))
    assert extent_of(base.t()[1]) == (start + 4, start + 4 + 4 * (5 * 5 + 1))
    empty = extent_of(base[:0])
    assert empty[0] == empty[1]


class Aliased(nn.Module):
    """Memory under two names, a transposed parameter, and one of another dtype."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        data = torch.randn(64, 64, generator=generator)
        self.first = nn.Parameter(data)
        self.second = nn.Parameter(data[:32])
        self.turned = nn.Parameter(torch.randn(96, 32, generator=generator).t())
        self.narrow = nn.Parameter(torch.randn(BLOCK_BYTES * 3, generator=generator).bfloat16())
        self.last = nn.Parameter(torch.randn(BLOCK_BYTES, generator=generator))


def bits(model: nn.Module) -> dict[str, bytes]:
    return {
        name: p.detach().contiguous().view(torch.uint8).numpy().tobytes()
        for name, p in model.named_parameters()
    }


def test_memory_under_two_names_and_odd_strides_come_back(tmp_path: Path) -> None:
    """What cannot be swapped is copied; both are restored to the bit."""
    saved = Aliased(1)
    with CheckpointManager(
        tmp_path, TrainState(model=saved), options=SaveOptions(mode="sync")
    ) as m:
        m.save()
    live = Aliased(2)
    with CheckpointManager(tmp_path, TrainState(model=live)) as manager:
        manager.restore()
    assert bits(live) == bits(saved)


@pytest.mark.parametrize("from_end", [1, BLOCK_BYTES * 2, BLOCK_BYTES * 5])
def test_damage_that_shows_late_puts_all_back(tmp_path: Path, from_end: int) -> None:
    """Blocks before the damaged one have been swapped by then; nothing of it stays."""
    with CheckpointManager(
        tmp_path, TrainState(model=Aliased(1)), options=SaveOptions(mode="sync")
    ) as m:
        m.save()
    (shard,) = tmp_path.rglob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-from_end] ^= 1
    shard.write_bytes(data)
    live = Aliased(2)
    before = bits(live)
    with (
        CheckpointManager(tmp_path, TrainState(model=live)) as manager,
        pytest.raises(CorruptCheckpointError, match="digest"),
    ):
        manager.restore(0)
    assert bits(live) == before
