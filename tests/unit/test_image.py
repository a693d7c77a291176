"""Where chunks lie in an image, which bytes a read needs, and who writes what exists more than once."""

from __future__ import annotations

import mmap
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_ckpt.commit.receipt import Attempt
from fsdp_ckpt.dcp.contents import Contents
from fsdp_ckpt.dcp.live import torch_dtype
from fsdp_ckpt.dcp.shard_image import ShardImage
from fsdp_ckpt.errors import CorruptCheckpointError, MismatchError
from fsdp_ckpt.manifest.shard import DIGEST_HEX
from fsdp_ckpt.plan.balance import assign_replicas
from fsdp_ckpt.plan.box import Box, byte_span, overlap, relative_slices
from fsdp_ckpt.plan.dtypes import itemsize, stored_form
from fsdp_ckpt.plan.image import BLOCK_BYTES, Entry, ImageLayout, coalesce_ranges, whole_blocks
from fsdp_ckpt.plan.layouts import Layout, ListedLayout, Mesh, MeshLayout, Placement
from fsdp_ckpt.snapshot.buffer import ImagePool
from fsdp_ckpt.snapshot.head_start import HeadStart
from fsdp_ckpt.snapshot.image import (
    STRIDE_BYTES,
    SideStreams,
    fill_image,
    view_bytes,
    view_entry,
)
from fsdp_ckpt.writer.job import NO_DIGEST

ITEMSIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1, "F4_E2M1_X2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4,
    "F32": 4, "C32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8, "C128": 16,
}  # fmt: skip
AS_BYTES = {"F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4_E2M1_X2", "C32", "C128"}

NAMES = st.sampled_from(["w", "w#1", "w#2", "w#1#1", "v", "", "__metadata__", "__metadata__#1"])


@st.composite
def boxed(draw: st.DrawFn) -> tuple[Box, Box]:
    """Draw a box and one inside it, neither empty."""
    ndim = draw(st.integers(0, 3))
    outer_offsets, outer_sizes, inner_offsets, inner_sizes = [], [], [], []
    for _ in range(ndim):
        start, size = draw(st.integers(0, 9)), draw(st.integers(1, 5))
        a = draw(st.integers(0, size - 1))
        outer_offsets.append(start)
        outer_sizes.append(size)
        inner_offsets.append(start + a)
        inner_sizes.append(draw(st.integers(1, size - a)))
    return (
        Box(tuple(inner_offsets), tuple(inner_sizes)),
        Box(tuple(outer_offsets), tuple(outer_sizes)),
    )


@st.composite
def chunk_lists(draw: st.DrawFn) -> list[tuple[str, str, tuple[int, ...], Box]]:
    """Draw what a rank writes; a tensor keeps its dtype, and its chunks are distinct."""
    dtypes: dict[str, str] = {}
    chunks = []
    for start in range(draw(st.integers(0, 8))):
        name = draw(NAMES)
        dtype = dtypes.setdefault(name, draw(st.sampled_from(list(ITEMSIZES))))
        sizes = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=2)))
        offsets = (10 * start, *(0 for _ in sizes[1:]))
        chunks.append((name, dtype, (100, *sizes[1:]), Box(offsets, sizes)))
    return chunks


@settings(deadline=None)
@given(chunk_lists())
def test_entries_are_packed_without_gaps_and_aligned(
    chunks: list[tuple[str, str, tuple[int, ...], Box]],
) -> None:
    """Every chunk has one entry; each starts where the one before ends, at a multiple of its element."""
    layout = ImageLayout.pack(chunks)
    position = 0
    for entry in layout.entries:
        assert entry.byte_offset == position
        assert position % ITEMSIZES[entry.dtype] == 0
        position += entry.num_bytes
    assert layout.data_bytes == position
    packed = Counter((e.name, e.dtype, e.shape, e.box) for e in layout.entries)
    assert packed == Counter(chunks)
    assert ImageLayout.pack(chunks) == layout


@settings(deadline=None)
@given(chunk_lists())
def test_keys_are_unique_and_readable(
    chunks: list[tuple[str, str, tuple[int, ...], Box]],
) -> None:
    """No two chunks share a key; a tensor's first chunk has its name, which no other tensor's chunk takes."""
    layout = ImageLayout.pack(chunks)
    keys = [entry.key for entry in layout.entries]
    assert len(set(keys)) == len(keys)
    assert "__metadata__" not in keys
    for name in {entry.name for entry in layout.entries} - {"__metadata__"}:
        assert [e.name for e in layout.entries if e.key == name] == [name]
    assert all(e.key == e.name or e.key.startswith(f"{e.name}#") for e in layout.entries)


def test_further_chunks_avoid_the_names_of_other_tensors() -> None:
    """``w#1`` stays the key of the tensor of that name."""
    boxes = [Box((i,), (1,)) for i in range(3)]
    layout = ImageLayout.pack(
        [("w", "U8", (3,), box) for box in boxes] + [("w#1", "U8", (1,), boxes[0])]
    )
    assert [(e.key, e.name) for e in layout.entries] == [
        ("w", "w"), ("w#2", "w"), ("w#3", "w"), ("w#1", "w#1"),
    ]  # fmt: skip


def test_wide_dtypes_come_first() -> None:
    """Order follows the width of an element, and within it the caller's order."""
    box = Box((0,), (3,))
    layout = ImageLayout.pack(
        (name, dtype, (3,), box)
        for name, dtype in [("a", "U8"), ("b", "F32"), ("c", "C128"), ("d", "F32"), ("e", "BF16")]
    )
    assert [(e.name, e.byte_offset) for e in layout.entries] == [
        ("c", 0), ("b", 48), ("d", 60), ("e", 72), ("a", 78),
    ]  # fmt: skip
    assert layout.data_bytes == 81
    assert layout.num_blocks == 1
    assert ImageLayout.pack([]) == ImageLayout((), 0)
    assert ImageLayout.pack([]).num_blocks == 0


@settings(deadline=None)
@given(
    st.integers(0, 5 * BLOCK_BYTES),
    st.integers(1, 5 * BLOCK_BYTES),
    st.integers(0, 2 * BLOCK_BYTES),
)
def test_blocks_are_those_with_a_byte_of_the_range(start: int, num_bytes: int, cut: int) -> None:
    """The blocks of a range reach beyond it by less than one on each side, or end with the data."""
    data_bytes = start + num_bytes + cut
    first, last = whole_blocks(start, start + num_bytes, data_bytes)
    assert first % BLOCK_BYTES == 0
    assert 0 <= start - first < BLOCK_BYTES
    assert 0 <= last - (start + num_bytes) < BLOCK_BYTES
    assert last % BLOCK_BYTES == 0 or last == data_bytes


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)).map(lambda r: (r[0], r[0] + r[1]))),
    st.integers(0, 5),
)
def test_coalesced_ranges_are_few_and_exact(wanted: list[tuple[int, int]], gap: int) -> None:
    """Ranges hold what is wanted and short gaps between, in order, no two of them with a short gap."""
    ranges = list(coalesce_ranges(wanted, gap))
    covered = {b for start, stop in ranges for b in range(start, stop)}
    needed = {b for start, stop in wanted for b in range(start, stop)}
    assert needed <= covered
    for extra in covered - needed:
        below = max((b for b in needed if b < extra), default=None)
        above = min((b for b in needed if b > extra), default=None)
        assert below is not None
        assert above is not None
        assert above - below - 1 <= gap
    stops = [stop for _, stop in ranges]
    assert all(stop + gap < start for stop, (start, _) in zip(stops, ranges[1:], strict=False))


@settings(deadline=None)
@given(boxed(), st.sampled_from(sorted(set(ITEMSIZES.values()))))
def test_byte_spans_reach_from_the_first_to_the_last_element(
    boxes: tuple[Box, Box], num_bytes: int
) -> None:
    """A span is as tight as a range can be around the elements, found by numbering them all."""
    inner, outer = boxes
    numbers = np.arange(outer.num_elements).reshape(outer.sizes)[relative_slices(inner, outer)]
    assert numbers.shape == inner.sizes
    span = byte_span(inner, outer, num_bytes)
    assert span == (numbers.min() * num_bytes, (numbers.max() + 1) * num_bytes)


@st.composite
def box_pairs(draw: st.DrawFn) -> tuple[Box, Box]:
    ndim = draw(st.integers(0, 3))
    numbers = st.lists(st.integers(0, 4), min_size=ndim, max_size=ndim).map(tuple)
    return Box(draw(numbers), draw(numbers)), Box(draw(numbers), draw(numbers))


def points_of(box: Box) -> set[tuple[int, ...]]:
    return {
        tuple(a + i for a, i in zip(box.offsets, index, strict=True))
        for index in np.ndindex(*box.sizes)
    }


@settings(deadline=None)
@given(box_pairs())
def test_overlap_is_the_common_elements(boxes: tuple[Box, Box]) -> None:
    """Two boxes meet in exactly the elements that both have; order does not matter."""
    a, b = boxes
    common = overlap(a, b)
    assert common == overlap(b, a)
    assert (points_of(common) if common else set()) == points_of(a) & points_of(b)
    assert common is None or common.num_elements


def test_boxes_of_different_tensors_do_not_compare() -> None:
    """Boxes must have the same number of dims."""
    with pytest.raises(MismatchError):
        overlap(Box((0,), (1,)), Box((0, 0), (1, 1)))


def test_dtypes_have_the_size_that_torch_gives_them() -> None:
    """Every dtype of the format takes as many bytes per element as in torch, whatever it is stored as."""
    for name, num_bytes in ITEMSIZES.items():
        assert itemsize(name) == num_bytes == torch_dtype(name).itemsize
        expected = ("U8", (2, 3, num_bytes)) if name in AS_BYTES else (name, (2, 3))
        assert stored_form(name, (2, 3)) == expected


@pytest.mark.parametrize("name", ["", "f32", "F128", "float32", "O"])
def test_unknown_dtypes_are_refused(name: str) -> None:
    """A dtype that version 1 does not have is damage."""
    with pytest.raises(CorruptCheckpointError, match="unknown dtype"):
        itemsize(name)


def everywhere(world_size: int) -> MeshLayout:
    return MeshLayout(Mesh.world(world_size), (Placement(),))


@settings(deadline=None)
@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 8))
def test_copies_are_spread_evenly(sizes: list[int], world_size: int) -> None:
    """No rank writes more than the mean and most of one tensor; every rank chooses the same."""
    tensors = [(4, (n,), everywhere(world_size)) for n in sizes]
    chosen = assign_replicas(tensors, world_size)
    loads = [0] * world_size
    for n, replica in zip(sizes, chosen, strict=True):
        loads[replica] += n
    assert max(loads) * world_size <= sum(sizes) + (world_size - 1) * max(sizes, default=0)
    assert assign_replicas(tensors, world_size) == chosen


@st.composite
def mixed_tensors(draw: st.DrawFn) -> list[tuple[int, tuple[int, ...], Layout]]:
    """Draw tensors of plain, sharded, hybrid and listed layouts on 8 ranks."""
    hybrid = Mesh((2, 4), tuple(range(8)))
    layouts: list[Layout] = [
        everywhere(8),
        MeshLayout(Mesh.world(8), (Placement(0),)),
        MeshLayout(hybrid, (Placement(), Placement(0))),
        MeshLayout(hybrid, (Placement(0), Placement())),
        MeshLayout(hybrid, (Placement(), Placement())),
        MeshLayout(Mesh((2,), (6, 7)), (Placement(),)),
    ]
    tensors: list[tuple[int, tuple[int, ...], Layout]] = []
    for _ in range(draw(st.integers(0, 12))):
        shape = (draw(st.integers(0, 40)),)
        owner = ListedLayout.of([(draw(st.integers(0, 7)), Box((0,), shape))])
        tensors.append(
            (draw(st.sampled_from([1, 4])), shape, draw(st.sampled_from([*layouts, owner])))
        )
    return tensors


@settings(deadline=None)
@given(mixed_tensors())
def test_the_choice_is_greedy_whatever_the_layouts(
    tensors: list[tuple[int, tuple[int, ...], Layout]],
) -> None:
    """Largest first, each tensor goes to the replica whose busiest rank has least to write so far."""

    def add(i: int, replica: int) -> None:
        num_bytes, shape, layout = tensors[i]
        chunks = layout.chunks(shape, replica)
        for rank, sizes in zip(chunks.ranks.tolist(), chunks.sizes.tolist(), strict=True):
            loads[rank] += num_bytes * sizes[0]

    loads = [0] * 8
    expected = [0] * len(tensors)
    free = [i for i, (_, _, layout) in enumerate(tensors) if layout.num_replicas > 1]
    for i in range(len(tensors)):
        if i not in free:
            add(i, 0)
    for i in sorted(free, key=lambda i: -tensors[i][0] * tensors[i][1][0]):
        layout = tensors[i][2]
        assert isinstance(layout, MeshLayout)
        busiest = [max(loads[r] for r in ranks) for ranks in layout.replica_ranks.tolist()]
        expected[i] = busiest.index(min(busiest))
        add(i, expected[i])
    assert assign_replicas(tensors, 8) == expected


def test_images_are_filled_to_the_bit() -> None:
    """Every entry of an image holds its tensor's bytes, whatever its dtype, strides, device views or size."""
    tensors = {
        "scalar": torch.tensor(-0.0, dtype=torch.float64),
        "strided": torch.arange(12, dtype=torch.int32).reshape(3, 4).t(),
        "flags": torch.tensor([True, False, True]),
        "half": torch.tensor([float("nan"), 1.5], dtype=torch.bfloat16),
        "conjugate": torch.tensor([1 + 2j], dtype=torch.complex64).conj(),
        "empty": torch.empty(0, 3),
        "grad": torch.ones(2, requires_grad=True),
    }
    names = {"float64": "F64", "int32": "I32", "bool": "BOOL", "bfloat16": "BF16", "complex64": "C64",
             "float32": "F32"}  # fmt: skip
    layout = ImageLayout.pack(
        (
            name,
            names[str(t.dtype).removeprefix("torch.")],
            tuple(t.shape),
            Box.whole(tuple(t.shape)),
        )
        for name, t in tensors.items()
    )
    buffer = ImagePool().acquire(4096 + layout.data_bytes)
    buffer.memory[:4096] = b"h" * 4096
    fill_image(buffer, 4096, layout, lambda entry: tensors[entry.name])
    assert buffer.memory[:4096] == b"h" * 4096
    for entry in layout.entries:
        tensor = tensors[entry.name].detach().resolve_conj().contiguous()
        found = view_entry(buffer, 4096, entry, tensor.dtype)
        assert found.shape == tensor.shape
        start = 4096 + entry.byte_offset
        expected = bytes(tensor.reshape(-1).view(torch.uint8).tolist())
        assert buffer.memory[start : start + entry.num_bytes] == expected


def test_a_head_start_copies_the_first_entries() -> None:
    """As many as there is time for; it fits an image that has its data in the same place and order."""
    tensors = {name: torch.full((5,), float(i)) for i, name in enumerate("abc")}
    layout = ImageLayout.pack((name, "F32", (5,), Box.whole((5,))) for name in tensors)
    pool = ImagePool()
    early = HeadStart(pool, 4096, layout)
    buffer = early.buffer
    buffer.memory[:] = b"x" * len(buffer)
    asked = iter([False, False, True])
    early.copy(lambda entry: tensors[entry.name], lambda: next(asked), SideStreams())
    assert early.num_entries == 2
    data = buffer.memory[4096 : 4096 + layout.data_bytes]
    assert data == bytes(torch.tensor([0.0] * 5 + [1.0] * 5).view(torch.uint8).tolist()) + b"x" * 20
    assert early.fits(4096, layout)
    assert not early.fits(8192, layout)
    assert not early.fits(4096, ImageLayout.pack([("a", "F32", (5,), Box.whole((5,)))]))


def test_nothing_is_put_into_an_image_that_is_said_to_be_filled() -> None:
    """The writer may be putting its own digests there; it hears of the end once, and after that nothing."""
    tensor = torch.zeros(2 * STRIDE_BYTES, dtype=torch.uint8)  # its last piece is worth a report
    layout = ImageLayout.pack([("w", "U8", tuple(tensor.shape), Box.whole(tuple(tensor.shape)))])
    contents = Contents(layout=layout, paths={"w": ("w",)}, resolve=lambda entry: tensor)
    pool = ImagePool()
    image = ShardImage.begin(contents, Attempt(id="a", step=1, world_size=1), 0, pool)
    hole = slice(image.digests_at, image.digests_at + DIGEST_HEX * layout.num_blocks)
    written = b"f" * (DIGEST_HEX * layout.num_blocks)
    told: list[int] = []

    def filled(num_bytes: int) -> None:
        told.append(num_bytes)
        if num_bytes == image.num_bytes:
            assert image.buffer.memory[hole] == NO_DIGEST.encode() * layout.num_blocks
            image.buffer.memory[hole] = written

    image.fill(filled)
    assert image.buffer.memory[hole] == written
    assert told == [image.data_offset + STRIDE_BYTES, image.num_bytes]
    pool.release(image.buffer)
    pool.close()


def test_the_writer_hears_of_the_first_bytes_soon_and_of_the_others_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twice as late each time, until a twelfth of the image lies between two reports."""
    monkeypatch.setattr("fsdp_ckpt.snapshot.image.STRIDE_BYTES", 16)
    tensor = torch.zeros(1200, dtype=torch.uint8)
    layout = ImageLayout.pack([("w", "U8", (1200,), Box.whole((1200,)))])
    memory = memoryview(bytearray(1200))
    told: list[int] = []
    fill_image(memory, 0, layout, lambda entry: tensor, filled=told.append)
    assert told[:4] == [16, 32, 64, 128]
    gaps = {b - a for a, b in pairwise(told[3:])}
    assert gaps == {112}  # the first multiple of 16 that is no less than 100
    assert 1200 - told[-1] <= 112


def test_views_share_the_images_memory() -> None:
    """Writing through a view changes the image, and nothing around it."""
    buffer = ImagePool().acquire(mmap.PAGESIZE)
    buffer.memory[:] = bytes(len(buffer))
    entry = Entry(key="w", name="w", dtype="I16", shape=(2,), box=Box((0,), (2,)), byte_offset=4)
    view_entry(buffer, 8, entry, torch.int16).fill_(-1)
    assert buffer.memory[:20] == bytes(12) + b"\xff" * 4 + bytes(4)
    assert view_bytes(buffer, 5, 5).shape == (0,)
    assert view_bytes(buffer, 12, 14).tolist() == [255, 255]


def test_buffers_are_used_again() -> None:
    """A released buffer comes back, the smallest that fits; one too small for today is given up."""
    pool = ImagePool(keep=2)
    small, large = pool.acquire(mmap.PAGESIZE), pool.acquire(4 * mmap.PAGESIZE)
    assert small is not large
    for buffer in (small, large):
        pool.release(buffer)
    assert pool.acquire(100) is small
    assert pool.acquire(100) is large
    for buffer in (small, large):
        pool.release(buffer)
    assert len(pool.acquire(8 * mmap.PAGESIZE)) == 8 * mmap.PAGESIZE
    assert pool.acquire(100) not in (small, large)
    pool.release(small)
    pool.close()
    assert pool.acquire(0) is not small


def test_a_buffer_with_a_file_in_it_is_the_last_to_be_used_again() -> None:
    """It can be asked for by the name of the file, once; got otherwise, a buffer has no name."""
    pool = ImagePool(keep=3)
    old, new, empty = (pool.acquire(mmap.PAGESIZE) for _ in range(3))
    pool.release(old, holds="old")
    pool.release(new, holds="new")
    pool.release(empty)
    assert pool.take_holding("another") is None
    assert pool.take_holding("new") is new
    assert pool.take_holding("new") is None
    pool.release(new, holds="new")
    assert [pool.acquire(1) for _ in range(3)] == [empty, old, new]
    for buffer in (old, new, empty):
        pool.release(buffer)
    assert pool.take_holding("old") is None
    pool.close()
