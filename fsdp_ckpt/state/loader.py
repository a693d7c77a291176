"""A DataLoader that a resumed run can make again in mid-epoch.

Invariant: what is random inside a sample follows from (seed, epoch, index) only, so that it does not
matter which process fetches it, or when; and no global generator is ever drawn from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from fsdp_ckpt.errors import MismatchError
from fsdp_ckpt.state.data import ResumableSampler
from fsdp_ckpt.state.rng import isolated_random_state, mix_words, seed_random_state

__all__ = ["make_loader", "sample_seed"]


def make_loader(
    dataset: Dataset[Any],
    sampler: ResumableSampler,
    *,
    batch_size: int | None,
    num_workers: int = 0,
    **kwargs: Any,
) -> DataLoader[Any]:
    """Make a DataLoader that a resumed run can make again in mid-epoch, to the bit.

    It never draws from a global generator. Python's ``random``, ``numpy.random`` and torch's CPU
    generator are seeded from (seed, epoch, index) for each ``dataset[index]``, and from the first
    sample of the batch for the collate function, in workers and in the main process alike; in the
    main process their states are put back. Generators that the dataset owns are its own affair.

    ``loader.dataset`` wraps the dataset (its attribute ``dataset``) and calls ``dataset[index]``
    one at a time even if it has ``__getitems__``: what is random in a bulk fetch would follow from
    the whole batch. A new iterator starts at the sampler's cursor.

    Args:
        dataset: Map-style, with ``sampler.num_samples`` samples if it has a length.
        sampler: Gives order and position; advance it, or the progress it is attached to.
        batch_size: Samples per batch on this rank; ``None`` for single samples without batches.
        num_workers: Worker processes; 0 loads in the main process.
        **kwargs: Anything else of DataLoader except ``sampler``, ``batch_sampler``, ``shuffle``,
            ``generator`` and ``in_order=False``.

    Raises:
        MismatchError: An iterable dataset, one of another length, or an order that is not kept.
    """
    if isinstance(dataset, IterableDataset):
        raise MismatchError(
            f"{type(dataset).__name__} is an IterableDataset, which has no sample indices to "
            "resume at: give a map-style dataset, or keep its position with your own state_dict"
        )
    if isinstance(dataset, Sized) and len(dataset) != sampler.num_samples:
        raise MismatchError(
            f"{type(dataset).__name__} has {len(dataset)} samples, its sampler "
            f"{sampler.num_samples}: make the sampler with num_samples=len(dataset)"
        )
    if not kwargs.pop("in_order", True):
        raise MismatchError(
            "in_order=False returns batches in another order than they were drawn, so that no "
            "cursor can tell which are consumed: leave it out"
        )
    # DataLoader draws a base seed whenever it is iterated, by default from the global generator.
    base_seeds = torch.Generator(device=torch.get_default_device())
    base_seeds.manual_seed(mix_words(sampler.seed))
    loader: DataLoader[Any] = DataLoader(
        _SeededDataset(dataset, sampler.seed),
        batch_size=batch_size,
        sampler=_KeySampler(sampler),
        num_workers=num_workers,
        generator=base_seeds,
        **kwargs,
    )
    # Wrapped afterwards: DataLoader knows which one collates by default.
    loader.collate_fn = _SeededCollate(loader.collate_fn, sampler.seed)
    return loader


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """Mix a sample's coordinates into one seed.

    Args:
        seed: Any integer; its low 64 bits count, as for the others.
        epoch: Index of the epoch.
        index: Index of the sample in the dataset.

    Returns:
        An int of [0, 2**64), different for each index of one epoch (a bijection of it).

    Source: `fsdp_ckpt.state.rng.mix_words`, chained splitmix64 finalizers.
    """
    return mix_words(seed, epoch, index)


_Key = tuple[int, int]  # epoch, index


class _KeySampler(Sampler[_Key]):
    """Sends the epoch along with each index: persistent workers outlive an epoch."""

    def __init__(self, sampler: ResumableSampler) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[_Key]:
        epoch = self.sampler.epoch
        return ((epoch, index) for index in self.sampler)

    def set_epoch(self, epoch: int) -> None:
        """Trainers call this on ``loader.sampler``."""
        self.sampler.set_epoch(epoch)


class _SeededDataset(Dataset[tuple[_Key, Any]]):
    """Fetches samples under their seeds, with the first one's key for the collate function.

    Global states are kept once per batch and not per sample: for numpy that costs 70 us.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: _Key) -> tuple[_Key, Any]:
        first, samples = self.__getitems__([key])
        return first, samples[0]

    def __getitems__(self, keys: Sequence[_Key]) -> tuple[_Key, list[Any]]:
        samples = []
        with isolated_random_state():
            for epoch, index in keys:
                seed_random_state(sample_seed(self.seed, epoch, index))
                samples.append(self.dataset[index])
        return keys[0], samples


class _SeededCollate:
    """Collates under the seed of the first sample, in a stream of its own."""

    def __init__(self, collate_fn: Callable[[Any], Any], seed: int) -> None:
        self.collate_fn = collate_fn
        self.seed = seed

    def __call__(self, fetched: tuple[_Key, Any]) -> Any:
        (epoch, index), data = fetched
        with isolated_random_state():
            # One word more than a sample's seed: a stream of its own.
            seed_random_state(mix_words(self.seed, epoch, index, 0))
            return self.collate_fn(data)
