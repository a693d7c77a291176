"""The state that all peers move, with digests that tell whether it came back as it was.

Invariant: no two tensors, and no two ranks' parts of a tensor, have the same bits, so that one taken for
another shows.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import xxhash

from bench_parts.training import Training

__all__ = ["PeerState"]


class PeerState:
    """A training state that can be filled, spoilt, and compared with how it was filled.

    Args:
        state_bytes: Over all ranks.
    """

    def __init__(self, state_bytes: int) -> None:
        self.training = Training(state_bytes)
        self.tensors = self.training.local_tensors()
        self.num_bytes = sum(tensor.nbytes for tensor in self.tensors)
        self._noise = max(self.tensors, key=torch.Tensor.numel).view(-1).clone()
        self.fill()
        self._digests = self._take_digests()

    def fill(self) -> None:
        """Give every tensor its values."""
        for number, tensor in enumerate(self.tensors):
            own = number * dist.get_world_size() + dist.get_rank() + 1
            torch.add(self._noise[: tensor.numel()], own, out=tensor.view(-1))

    def spoil(self) -> None:
        """Make every element wrong, so that what is right afterwards was loaded."""
        for tensor in self.tensors:
            tensor.fill_(float("nan"))

    def num_wrong(self) -> int:
        """Return how many of this rank's tensors are not as they were filled, bit by bit."""
        return sum(
            found != filled
            for found, filled in zip(self._take_digests(), self._digests, strict=True)
        )

    def _take_digests(self) -> list[int]:
        return [xxhash.xxh3_64_intdigest(tensor.view(-1).numpy()) for tensor in self.tensors]
