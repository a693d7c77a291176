"""Windows of output files, assembled from what ranks hold by the ranks that write them.

    window of a file -> regions -> who holds which part     known to every rank, from layouts alone
    holder: its parts, converted, as one message ──> owner: each part to its place in the window

Invariant: every rank goes through the same windows in the same order, so each message meets the one who waits
for it; each element is sent once at most, and nobody holds more than the windows of one round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist

from fsdp_ckpt.dcp.live import torch_dtype
from fsdp_ckpt.hf.layout import OutputFile, Region
from fsdp_ckpt.manifest.schema import TensorRow
from fsdp_ckpt.plan.box import Box, overlap, relative_slices
from fsdp_ckpt.plan.dtypes import itemsize

__all__ = ["Window", "gather_windows"]

# Which part of the window's tensors a rank holds: the chunk, and what of it the region takes.
Part = tuple[Region, Box, Box]
Parts = Callable[[str], Sequence[tuple[Box, torch.Tensor]]]


@dataclass(frozen=True, kw_only=True)
class Window:
    """A part of one output file.

    Args:
        file: The file.
        owner: Rank that writes it.
        start: First byte of the file's data.
        stop: One past the last byte.
        rows: Name in the output → how ranks hold the tensor.
    """

    file: OutputFile
    owner: int
    start: int
    stop: int
    rows: Mapping[str, TensorRow]

    @cached_property
    def parts(self) -> dict[int, list[Part]]:
        """Rank → what it contributes, in the order of its message."""
        found: dict[int, list[Part]] = {}
        for region in self.file.regions(self.start, self.stop):
            for rank, chunk in self.rows[region.tensor.name].overlapping(region.box):
                box = overlap(chunk, region.box)
                if box is not None:
                    found.setdefault(rank, []).append((region, chunk, box))
        return found

    def message_bytes(self, rank: int) -> int:
        """Return the length of a rank's message."""
        parts = self.parts.get(rank, [])
        return sum(box.num_elements * itemsize(region.tensor.dtype) for region, _, box in parts)

    def place(self, rank: int, message: torch.Tensor, data: torch.Tensor) -> None:
        """Copy a rank's message to its places in the window's bytes."""
        at = 0
        for region, _, box in self.parts[rank]:
            target = self.target(region, box, data)
            stop = at + box.num_elements * target.element_size()
            target.copy_(message[at:stop].view(target.dtype).view(box.sizes))
            at = stop

    def target(self, region: Region, box: Box, data: torch.Tensor) -> torch.Tensor:
        """Return where a part goes in the window's bytes, shape ``box.sizes``."""
        # Aligned: windows start at multiples of every element size.
        start = region.byte_offset - self.start
        whole = data[start : start + region.num_bytes].view(torch_dtype(region.tensor.dtype))
        return whole.view(region.box.sizes)[relative_slices(box, region.box)]


def gather_windows(
    windows: Iterable[Window],
    rank: int,
    parts_of: Parts,
    device: torch.device,
    note_overflow: Callable[[str, int], None],
) -> dict[str, memoryview]:
    """Bring one round's windows together; called by every rank with the same windows.

    Args:
        windows: At most one per owner.
        rank: This rank.
        parts_of: Name in the output → (box, elements) that this rank holds.
        device: Where messages travel.
        note_overflow: Told of a tensor in which finite numbers became infinite, and how many.

    Returns:
        File → bytes of its window, for those that this rank owns.
    """
    operations: list[dist.P2POp] = []
    received: list[tuple[Window, int, torch.Tensor]] = []
    found: dict[str, torch.Tensor] = {}
    for window in windows:
        mine = _parts_here(window, rank, parts_of, note_overflow)
        if window.owner != rank:
            if window.parts.get(rank):
                message = torch.cat([bytes_of(part) for _, _, part in mine]).to(device)
                operations.append(dist.P2POp(dist.isend, message, window.owner))
            continue
        data = found[window.file.name] = torch.empty(window.stop - window.start, dtype=torch.uint8)
        for region, box, part in mine:
            window.target(region, box, data).copy_(part)
        for other in sorted(window.parts.keys() - {rank}):
            num_bytes = window.message_bytes(other)
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            operations.append(dist.P2POp(dist.irecv, buffer, other))
            received.append((window, other, buffer))
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    for window, sender, message in received:
        window.place(sender, message.cpu(), found[window.file.name])
    return {name: data.numpy().data for name, data in found.items()}


def _parts_here(
    window: Window, rank: int, parts_of: Parts, note_overflow: Callable[[str, int], None]
) -> Iterator[tuple[Region, Box, torch.Tensor]]:
    """Yield what this rank holds of a window, converted, in the order of its message."""
    for region, chunk, box in window.parts.get(rank, ()):
        name, dtype = region.tensor.name, torch_dtype(region.tensor.dtype)
        local = next(part for held, part in parts_of(name) if held == chunk)
        source = local.detach()[relative_slices(box, chunk)]
        converted = source.to(dtype)
        if dtype != source.dtype and (count := _num_overflows(source, converted)):
            note_overflow(name, count)
        yield region, box, converted


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements, row-major, as bytes on its device."""
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _num_overflows(source: torch.Tensor, converted: torch.Tensor) -> int:
    """Count finite numbers that became infinite."""
    wide = source if source.dtype == torch.float64 else source.float()
    return int((converted.float().isinf() & wide.isfinite()).sum())
