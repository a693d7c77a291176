"""Ranks share files evenly, and their rounds move every byte of the output once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fsdp_ckpt.commit.locate import locate_checkpoint
from fsdp_ckpt.hf.planning import make_plan
from fsdp_ckpt.hf.rounds import plan_rounds, share_out
from fsdp_ckpt.hf.segments import SourceSegments
from fsdp_ckpt.hf.selection import Selection
from fsdp_ckpt.plan.image import BLOCK_BYTES
from fsdp_ckpt.storage.local import LocalStore
from tests.weights import save


@given(st.lists(st.integers(0, 100), max_size=30), st.integers(1, 6))
def test_bytes_are_balanced(sizes: list[int], num_ranks: int) -> None:
    """No rank has more than a fair share and one item on top."""
    loads: Counter[int] = Counter()
    for size, rank in zip(sizes, share_out(sizes, num_ranks), strict=True):
        loads[rank] += size
    assert max(loads.values(), default=0) <= sum(sizes) / num_ranks + max(sizes, default=0)
    assert set(loads) <= set(range(num_ranks))


def test_rounds_cover_the_output_once(tmp_path: Path) -> None:
    """Every window of every file is in one round, and what is sent for it is all of its tensors' bytes."""
    tensors = {f"t{i}": torch.zeros(1000 + i, 3) for i in range(7)}
    save(tmp_path, nn.ParameterDict(tensors))
    checkpoint, _ = locate_checkpoint(LocalStore(str(tmp_path)))
    plan = make_plan(checkpoint, Selection(), 30_000)
    owners = share_out([file.num_bytes for file in plan.files], 3)
    written: Counter[str] = Counter()
    sent = 0
    for round_ in plan_rounds(plan, plan.files, owners, [1], 4096):
        assert len(round_.windows) <= 3
        for owner, window in round_.windows.items():
            assert window.start == written[window.file.name]
            written[window.file.name] = window.stop
            assert owners[plan.files.index(window.file)] == owner
        sent += sum(piece.num_bytes for pieces in round_.pieces.values() for piece, _ in pieces)
    assert written == plan.sizes
    assert sent == sum(file.data_bytes for file in plan.files)


def test_buffers_shrink_with_the_number_of_files(tmp_path: Path) -> None:
    """Every file has a buffer that waits; many files have short ones, and the sum stays."""
    save(tmp_path, nn.Linear(2, 2))
    checkpoint, _ = locate_checkpoint(LocalStore(str(tmp_path)))
    for num_files, expected in ((1, 16), (24, 12), (100, 3), (400, 1), (4000, 1)):
        segments = SourceSegments(
            checkpoint, buffer_bytes=400 * BLOCK_BYTES, num_files=num_files, num_threads=4
        )
        assert segments.segment_bytes == expected * BLOCK_BYTES
