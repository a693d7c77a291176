"""The data cursor and the loader: no sample twice, none skipped, random numbers included."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import Dataset, IterableDataset

from fsdp_ckpt.errors import MismatchError
from fsdp_ckpt.state.data import ResumableSampler
from fsdp_ckpt.state.loader import make_loader, sample_seed
from fsdp_ckpt.state.rng import isolated_random_state

NUM_SAMPLES = 37


class Augmented(Dataset[dict[str, Any]]):
    """Samples with all three kinds of randomness; remembers what this process fetched."""

    def __init__(self) -> None:
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.fetched.append(index)
        return {
            "index": index,
            "python": random.random(),
            "gauss": random.gauss(0, 1),
            "numpy": np.random.standard_normal(),
            "torch": torch.randn(3),
        }


def mask_randomly(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Collate with a random mask, as language model collators do."""
    batch = {name: torch.stack([torch.as_tensor(s[name]) for s in samples]) for name in samples[0]}
    batch["mask"] = torch.rand(len(samples)) + np.random.rand() + random.random()
    return batch


def bits(batches: Any) -> list[dict[str, bytes]]:
    return [{name: value.numpy().tobytes() for name, value in b.items()} for b in batches]


def ranks_of(world_size: int, state: dict[str, Any], **options: Any) -> list[ResumableSampler]:
    samplers = [
        ResumableSampler(state["num_samples"], rank=r, world_size=world_size, **options)
        for r in range(world_size)
    ]
    for sampler in samplers:
        sampler.load_state_dict(state)
    return samplers


def global_states() -> tuple[Any, ...]:
    numpy = np.random.get_state(legacy=False)
    return (
        random.getstate(),
        numpy["state"]["key"].tolist(),
        (numpy["state"]["pos"], numpy["has_gauss"], numpy["gauss"]),
        torch.get_rng_state().tolist(),
    )


@settings(max_examples=150, deadline=None)
@given(
    num_samples=st.integers(1, 200),
    epoch=st.integers(0, 3),
    shuffle=st.booleans(),
    hops=st.lists(
        st.tuples(st.integers(1, 7), st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=5
    ),
)
def test_an_epoch_over_changing_worlds_has_every_sample_once(
    num_samples: int, epoch: int, shuffle: bool, hops: list[tuple[int, int, int]]
) -> None:
    """Over any (world size, batch, steps) hops each sample comes once, up to the dropped tail."""
    options: dict[str, Any] = {"shuffle": shuffle, "seed": 3}
    reference = ResumableSampler(num_samples, rank=0, world_size=1, **options)
    reference.set_epoch(epoch)
    order = list(reference)
    assert sorted(order) == list(range(num_samples))

    state = reference.state_dict()
    seen: list[int] = []
    for world_size, batch, steps in [*hops, (hops[-1][0], 1, num_samples)]:
        samplers = ranks_of(world_size, state, **options)
        assert len({len(sampler) for sampler in samplers}) == 1
        iterators = [iter(sampler) for sampler in samplers]
        for _ in range(min(steps, len(samplers[0]) // batch)):
            step = [index for it in iterators for index in islice(it, batch)]
            start = samplers[0].cursor
            assert sorted(step) == sorted(order[start : start + batch * world_size])
            seen += step
            for sampler in samplers:
                sampler.advance(len(step))
        assert len({str(sampler.state_dict()) for sampler in samplers}) == 1
        state = samplers[0].state_dict()
    assert sorted(seen) == sorted(order[: state["cursor"]])
    assert num_samples - state["cursor"] < hops[-1][0]


@settings(max_examples=80, deadline=None)
@given(num_samples=st.integers(1, 60), world_size=st.integers(1, 9), consumed=st.integers(0, 60))
def test_padding_repeats_only_what_is_needed(
    num_samples: int, world_size: int, consumed: int
) -> None:
    """With "pad" all ranks get equally many, every sample comes, repeats are fewer than ranks."""
    state = ResumableSampler(num_samples).state_dict() | {"cursor": min(consumed, num_samples)}
    order = list(ResumableSampler(num_samples))
    samplers = ranks_of(world_size, state, tail="pad")
    per_rank = [list(sampler) for sampler in samplers]
    assert {len(ids) for ids in per_rank} == {len(samplers[0])}
    dealt = [ids[turn] for turn in range(len(samplers[0])) for ids in per_rank]
    remaining = order[state["cursor"] :]
    assert dealt[: len(remaining)] == remaining
    repeats = dealt[len(remaining) :]
    assert len(repeats) < world_size
    assert repeats == (order * world_size)[: len(repeats)]
    samplers[0].advance(len(dealt))
    assert samplers[0].cursor == num_samples
    assert len(samplers[0]) == 0


def test_orders_follow_from_seed_and_epoch_only() -> None:
    """Another seed or epoch is another permutation; the same ones are the same, whoever asks."""

    def order(seed: int, epoch: int) -> tuple[int, ...]:
        sampler = ResumableSampler(50, seed=seed)
        sampler.set_epoch(epoch)
        return tuple(sampler)

    torch.manual_seed(1)
    orders = [order(seed, epoch) for seed in (0, 1, -1) for epoch in range(3)]
    torch.manual_seed(2)
    assert orders == [order(seed, epoch) for seed in (0, 1, -1) for epoch in range(3)]
    assert len(set(orders)) == 9
    assert list(ResumableSampler(50, shuffle=False)) == list(range(50))


def test_orders_never_change() -> None:
    """An epoch begun with an earlier version ends in the same order with this one."""
    sampler = ResumableSampler(12, seed=17)
    sampler.set_epoch(3)
    assert list(sampler) == [6, 5, 2, 11, 9, 10, 8, 1, 3, 4, 7, 0]


def test_ranks_come_from_the_process_group() -> None:
    """Without rank and world size the process group tells; without a group there is one rank."""
    assert list(ResumableSampler(8, shuffle=False)) == list(range(8))
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    try:
        assert list(ResumableSampler(8, shuffle=False)) == [1, 5]
        assert list(ResumableSampler(8, shuffle=False, rank=0, world_size=2)) == [0, 2, 4, 6]
    finally:
        dist.destroy_process_group()


def test_blocks_join_without_a_seam() -> None:
    """More indices per rank than are turned into ints at a time come complete and in order."""
    sampler = ResumableSampler(100_003, rank=1, world_size=2, shuffle=False)
    assert list(sampler) == list(range(1, 100_002, 2))


def test_skipping_costs_nothing() -> None:
    """A cursor far into an epoch that no loop could walk starts at once."""
    sampler = ResumableSampler(10**15, rank=0, world_size=2, shuffle=False)
    sampler.advance(10**15 - 4)
    assert list(sampler) == [10**15 - 4, 10**15 - 2]


def test_set_epoch_resets_the_cursor_only_on_change() -> None:
    """Naming the current epoch again, as a resumed loop does, keeps the position."""
    sampler = ResumableSampler(20)
    sampler.set_epoch(2)
    sampler.advance(5)
    sampler.set_epoch(2)
    assert (sampler.epoch, sampler.cursor, len(sampler)) == (2, 5, 15)
    sampler.set_epoch(3)
    assert (sampler.epoch, sampler.cursor, len(sampler)) == (3, 0, 20)
    with pytest.raises(MismatchError):
        sampler.set_epoch(-1)
    assert sampler.epoch == 3


@pytest.mark.parametrize("samples", [-1, 6])
def test_impossible_advances_are_refused(samples: int) -> None:
    """Consuming less than nothing or more than is left is an error; the cursor stays."""
    sampler = ResumableSampler(20)
    sampler.advance(15)
    with pytest.raises(MismatchError, match=f"cannot advance by {samples}"):
        sampler.advance(samples)
    assert sampler.cursor == 15


def test_mismatches_are_all_named() -> None:
    """Another size, seed and order are one error with the three of them; nothing has changed."""
    saved = ResumableSampler(20, seed=1, shuffle=False).state_dict()
    sampler = ResumableSampler(30, seed=2)
    sampler.advance(3)
    with pytest.raises(MismatchError) as caught:
        sampler.load_state_dict(saved)
    for words in ("num_samples was 20, now 30", "seed was 1, now 2", "shuffle was False, now True"):
        assert words in str(caught.value)
    assert sampler.cursor == 3


@pytest.mark.parametrize(
    "change",
    [{"cursor": 21}, {"cursor": -1}, {"epoch": -1}, {"cursor": 1.0}, {"epoch": True}, {"more": 1}],
)
def test_impossible_positions_are_refused(change: dict[str, Any]) -> None:
    """A position outside the epoch or of another type does not load."""
    sampler = ResumableSampler(20)
    with pytest.raises(MismatchError, match=next(iter(change))):
        sampler.load_state_dict(sampler.state_dict() | change)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ResumableSampler(0),
        lambda: ResumableSampler(5, rank=2, world_size=2),
        lambda: ResumableSampler(5, rank=1),
        lambda: ResumableSampler(5, tail="keep"),  # type: ignore[arg-type]
    ],
)
def test_impossible_samplers_are_refused(make: Callable[[], ResumableSampler]) -> None:
    """No samples, a rank outside the world and an unknown tail are errors at once."""
    with pytest.raises(MismatchError):
        make()


@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (2, True)])
def test_a_resumed_loader_continues_to_the_bit(num_workers: int, persistent: bool) -> None:
    """A new loader in mid-epoch, and all epochs after, equal an uninterrupted run's bits."""

    def run(sampler: ResumableSampler, workers: int, **options: Any) -> Iterator[Any]:
        loader = make_loader(
            Augmented(),
            sampler,
            batch_size=4,
            num_workers=workers,
            collate_fn=mask_randomly,
            **options,
        )
        for epoch in range(sampler.epoch, 3):
            loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]  # Iterable for torch
            for batch in loader:
                yield batch
                sampler.advance(len(batch["index"]))

    random.seed(0)
    whole = bits(run(ResumableSampler(NUM_SAMPLES, seed=5), 0))
    stopped = ResumableSampler(NUM_SAMPLES, seed=5)
    before = bits(islice(run(stopped, 0), 14))
    # The 14th batch was yielded and not yet counted.
    stopped.advance(4)
    state = stopped.state_dict()
    assert (state["epoch"], state["cursor"]) == (1, 16)

    random.seed(1)
    resumed = ResumableSampler(NUM_SAMPLES, seed=5)
    resumed.load_state_dict(state)
    options = {"persistent_workers": True} if persistent else {}
    after = bits(run(resumed, num_workers, **options))
    assert before + after == whole
    assert len({b["mask"] for b in whole}) == len(whole)


def test_prefetched_samples_are_not_consumed() -> None:
    """The cursor counts what training reported, not what workers fetched ahead."""
    sampler = ResumableSampler(NUM_SAMPLES)
    loader = make_loader(Augmented(), sampler, batch_size=2, num_workers=1, prefetch_factor=8)
    batches = iter(loader)
    next(batches)
    sampler.advance(2)
    assert sampler.cursor == 2
    assert len(loader) == 18
    assert next(batches)["index"].tolist() == list(sampler)[:2]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sample_is_the_same_on_any_world(num_workers: int) -> None:
    """Random values inside a sample follow from its index, not from rank or worker."""

    def samples(rank: int, world_size: int, workers: int) -> dict[int, Any]:
        sampler = ResumableSampler(NUM_SAMPLES, rank=rank, world_size=world_size, tail="pad")
        loader = make_loader(Augmented(), sampler, batch_size=None, num_workers=workers)
        return {s["index"]: [*list(s.values())[:4], s["torch"].tolist()] for s in loader}

    alone = samples(0, 1, 0)
    assert len(alone) == NUM_SAMPLES
    assert len({str(values[1:]) for values in alone.values()}) == NUM_SAMPLES
    shared = samples(2, 3, num_workers)
    assert len(shared) == 13
    assert shared == {index: alone[index] for index in shared}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_loading_leaves_global_states_alone(num_workers: int) -> None:
    """Making and iterating a loader draws nothing from the process's own generators."""
    # Odd draws, so that each generator holds a cached normal.
    random.gauss(0, 1)
    np.random.standard_normal()
    torch.randn(1)
    before = global_states()
    sampler = ResumableSampler(NUM_SAMPLES)
    loader = make_loader(
        Augmented(), sampler, batch_size=8, num_workers=num_workers, collate_fn=mask_randomly
    )
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for _ in loader:
            assert global_states() == before
    assert global_states() == before


def test_a_failing_sample_leaves_global_states_alone() -> None:
    """An exception of the dataset puts the states back too."""

    class Broken(Augmented):
        def __getitem__(self, index: int) -> dict[str, Any]:
            super().__getitem__(index)
            raise RuntimeError("unreadable")

    before = global_states()
    with pytest.raises(RuntimeError, match="unreadable"):
        next(iter(make_loader(Broken(), ResumableSampler(NUM_SAMPLES), batch_size=2)))
    assert global_states() == before


def test_skipped_samples_are_not_fetched() -> None:
    """Resuming reads the remaining samples of the dataset and no other."""
    dataset = Augmented()
    sampler = ResumableSampler(NUM_SAMPLES)
    order = list(sampler)
    sampler.advance(30)
    assert [b["index"].tolist() for b in make_loader(dataset, sampler, batch_size=4)] == [
        order[30:34],
        order[34:],
    ]
    assert dataset.fetched == order[30:]


def test_streams_of_a_sample_differ() -> None:
    """Python and numpy are the same algorithm and still draw different numbers for a sample."""

    class Draws(Augmented):
        def __getitem__(self, index: int) -> Any:
            return random.random(), float(np.random.random_sample())

    with isolated_random_state():
        random.seed(7)
        np.random.seed([7])
        assert random.random() == np.random.random_sample(), "the danger is real"
    draws = make_loader(Draws(), ResumableSampler(NUM_SAMPLES), batch_size=None)
    assert all(python != numpy for python, numpy in draws)


def test_sample_seeds_are_distinct_and_fixed() -> None:
    """Each coordinate counts, no two samples of an epoch collide, and the mixing never changes."""
    seeds = [sample_seed(s, e, i) for s in range(3) for e in range(3) for i in range(500)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert sample_seed(-1, 0, 0) == sample_seed(2**64 - 1, 0, 0)
    assert sample_seed(1, 2, 3) == 15020427595393229491


def test_the_loader_can_start_workers_by_spawning() -> None:
    """What a worker receives can be sent to a fresh interpreter."""
    loader = make_loader(Augmented(), ResumableSampler(NUM_SAMPLES), batch_size=2)
    dataset, collate = pickle.loads(pickle.dumps((loader.dataset, loader.collate_fn)))
    again = collate(dataset.__getitems__([(0, 5), (0, 6)]))
    here = loader.collate_fn(loader.dataset.__getitems__([(0, 5), (0, 6)]))  # type: ignore[attr-defined]
    assert again["torch"].tolist() == here["torch"].tolist()


class Endless(IterableDataset[int]):
    """Has no sample indices."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_what_cannot_resume_is_refused() -> None:
    """Iterable datasets, another length and unordered workers are refused at once."""
    sampler = ResumableSampler(NUM_SAMPLES)
    with pytest.raises(MismatchError, match="Endless is an IterableDataset"):
        make_loader(Endless(), sampler, batch_size=2)
    with pytest.raises(MismatchError, match="has 37 samples, its sampler 36"):
        make_loader(Augmented(), ResumableSampler(36), batch_size=2)
    with pytest.raises(MismatchError, match="in_order"):
        make_loader(Augmented(), sampler, batch_size=2, num_workers=1, in_order=False)
