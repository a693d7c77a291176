"""The life of a process group, from its start to an end that leaves the exit code alone.

A gloo group that is still alive, or still referenced, when the interpreter exits can abort the process (now
and then, with torch 2.13): a run that did its work then ends with exit code -6. So training ends in this
order, here and nowhere else::

    barrier -> drop model and optimizer -> gc.collect() -> destroy_process_group()

The barrier keeps a fast rank from cutting the connections of a slow one. Sharded parameters hold the group
through their device mesh, in reference cycles; hence the collection. The references are the caller's to
drop: build model and optimizer in a function that is called inside the ``with`` block::

    with process_group("gloo"):
        train()
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

__all__ = ["end_process_group", "process_group"]


@contextmanager
def process_group(
    backend: str | None = None,
    *,
    init_method: str | None = None,
    rank: int = -1,
    world_size: int = -1,
    timeout_s: float | None = None,
) -> Iterator[None]:
    """Start the default process group and end it in the order that this module states.

    Called by every rank. When the body raises, the group is dropped without a barrier, which the ranks that
    are still at work would never reach.

    Args:
        backend: As in ``torch.distributed.init_process_group``; ``None`` takes the device's own.
        init_method: Rendezvous URL, such as ``file:///path``; ``None`` reads what torchrun has set.
        rank: This process, 0 <= rank < world_size; -1 reads ``RANK``.
        world_size: Number of processes; -1 reads ``WORLD_SIZE``.
        timeout_s: Seconds that one collective may take; ``None`` is the backend's default.
    """
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    store = None
    if init_method is None and (life := os.environ.get("TORCHELASTIC_RESTART_COUNT")):
        # torchrun keeps one store for all lives of a job (torch 2.13): without a name of its own, this life's
        # ranks would find addresses, and answers, of ranks that are dead.
        shared, rank, world_size = next(rendezvous("env://", rank, world_size))
        store = dist.PrefixStore(f"life-{life}", shared)  # type: ignore[attr-defined]  # torch lists no names
    dist.init_process_group(
        backend,
        init_method=init_method,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    try:
        yield
    except BaseException:
        _drop_process_group()
        raise
    end_process_group()


def end_process_group() -> None:
    """Wait for every rank, then drop the default process group.

    Called by every rank, after it has dropped its own references to model and optimizer. Does nothing where
    no group is initialised.
    """
    if not dist.is_initialized():
        return
    try:
        dist.barrier()
    finally:
        _drop_process_group()


def _drop_process_group() -> None:
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
