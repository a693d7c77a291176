"""Any sharding saved and read as any other is the identity, with numpy arrays in place of files and ranks.

Layouts are drawn by rules of this module's own: nested cuts in any order, flat groups, cut-up boxes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_ckpt.plan.box import Box, byte_span, overlap, relative_slices
from fsdp_ckpt.plan.flat import flat_range_boxes
from fsdp_ckpt.plan.image import ImageLayout
from fsdp_ckpt.plan.layouts import FlatLayout, Layout, ListedLayout, Mesh, MeshLayout, Placement

# 0-d, size 1, empty, primes, fewer rows than ranks.
SHAPES = st.one_of(
    st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 13]), max_size=2),
    st.lists(st.sampled_from([0, 1, 2, 3, 4, 7]), min_size=3, max_size=4),
    st.lists(st.sampled_from([1, 2, 3, 5]), min_size=1, max_size=4),
).map(tuple)
NOTHING = 0xEE  # what a reader must never look at


@dataclass(frozen=True)
class Nest:
    """A mesh layout, and the cuts that it was made from, outermost first."""

    layout: MeshLayout
    order: tuple[int, ...]


@st.composite
def nests(draw: st.DrawFn, shape: tuple[int, ...]) -> Nest:
    """Draw a mesh whose axes cut the tensor in any order, several the same dim, or replicate it."""
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dims = [draw(st.sampled_from([None, *range(len(shape))])) for _ in mesh_shape]
    order = tuple(i for i in draw(st.permutations(range(len(dims)))) if dims[i] is not None)
    placements = tuple(
        Placement(dim, _strides_over(axis, order, dims, mesh_shape))
        if dim is not None
        else Placement()
        for axis, dim in enumerate(dims)
    )
    ranks = draw(st.permutations(range(math.prod(mesh_shape))))
    return Nest(MeshLayout(Mesh(mesh_shape, tuple(ranks)), placements), order)


def _strides_over(
    axis: int, order: tuple[int, ...], dims: list[int | None], mesh_shape: tuple[int, ...]
) -> int:
    """Return into how many pieces later axes have cut the dim before ``axis`` does."""
    before = order[: order.index(axis)]
    return math.prod(mesh_shape[i] for i in before if i > axis and dims[i] == dims[axis])


@st.composite
def flat_layouts(draw: st.DrawFn, shape: tuple[int, ...]) -> FlatLayout:
    """Draw a flat group in which the tensor lies somewhere."""
    replicas, shards, start = (draw(st.integers(*span)) for span in ((1, 2), (1, 5), (0, 9)))
    ranks = draw(st.permutations(range(replicas * shards)))
    fitting = max(-(-(start + math.prod(shape)) // shards), 1)
    return FlatLayout(
        Mesh((replicas, shards), tuple(ranks)), fitting + draw(st.integers(0, 3)), start
    )


@st.composite
def listed_layouts(draw: st.DrawFn, shape: tuple[int, ...]) -> ListedLayout:
    """Draw boxes that make up the tensor, by cutting boxes in two, and a rank for each."""
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 5))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        if not shape:
            return ListedLayout.of([(draw(st.integers(0, 4)), box)])
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.sizes[dim]))
        for start, size in ((0, at), (at, box.sizes[dim] - at)):
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[dim] += start
            sizes[dim] = size
            boxes.append(Box(tuple(offsets), tuple(sizes)))
    return ListedLayout.of((draw(st.integers(0, 4)), box) for box in boxes)


def layouts(shape: tuple[int, ...]) -> st.SearchStrategy[Layout]:
    """Draw any sharding of a tensor."""
    meshes = nests(shape).map(lambda nest: nest.layout)
    return st.one_of(meshes, flat_layouts(shape), listed_layouts(shape))


@st.composite
def reshardings(draw: st.DrawFn) -> tuple[dict[str, np.ndarray], dict[str, tuple[Layout, Layout]]]:
    """Draw tensors, and how each is sharded when it is saved and when it is loaded."""
    tensors, shardings = {}, {}
    for i, dtype in enumerate(draw(st.lists(st.sampled_from("BHIQ"), min_size=1, max_size=3))):
        shape = draw(SHAPES)
        numbers = np.arange(math.prod(shape), dtype=np.uint64) * 0x9E3779B97F4A7C15 + i
        tensors[f"t{i}"] = numbers.astype(dtype).reshape(shape)
        shardings[f"t{i}"] = draw(layouts(shape)), draw(layouts(shape))
    return tensors, shardings


DTYPES = {1: "U8", 2: "U16", 4: "U32", 8: "U64"}
Files = dict[int, tuple[ImageLayout, bytes]]


def write(tensors: dict[str, np.ndarray], saved: dict[str, Layout], replica: int) -> Files:
    """Return each rank's chunks as its file's data."""
    files: Files = {}
    for rank in sorted({rank for layout in saved.values() for rank in layout.ranks}):
        chunks = [
            (name, DTYPES[tensors[name].itemsize], tensors[name].shape, box)
            for name, layout in saved.items()
            if layout.replica_of(rank) == replica % layout.num_replicas
            for box in layout.boxes_of(tensors[name].shape, rank)
        ]
        image = ImageLayout.pack(chunks)
        data = b"".join(
            tensors[e.name][relative_slices(e.box, Box.whole(e.shape))].tobytes()
            for e in image.entries
        )
        assert len(data) == image.data_bytes
        assert len({e.key for e in image.entries}) == len(chunks)
        files[rank] = image, data
    return files


def read(
    files: Files, name: str, like: np.ndarray, saved: Layout, replica: int, wanted: Box
) -> np.ndarray:
    """Return a box of a tensor from the files' bytes, of which only the needed spans are looked at."""
    itemsize = like.itemsize
    found = np.full((*wanted.sizes, itemsize), NOTHING, np.uint8)
    times = np.zeros(wanted.sizes, np.int64)
    for rank, box in saved.overlapping(like.shape, replica % saved.num_replicas, wanted):
        image, data = files[rank]
        (entry,) = (e for e in image.entries if e.name == name and e.box == box)
        region = overlap(box, wanted)
        assert region is not None
        start, stop = byte_span(region, box, itemsize)
        chunk = np.full(entry.num_bytes, NOTHING, np.uint8)
        chunk[start:stop] = np.frombuffer(data, np.uint8)[entry.byte_offset :][start:stop]
        chunk = chunk.reshape(*box.sizes, itemsize)
        found[relative_slices(region, wanted)] = chunk[relative_slices(region, box)]
        times[relative_slices(region, wanted)] += 1
    assert (times == 1).all()
    return found


@settings(deadline=None, max_examples=200)
@given(reshardings(), st.integers(0, 15))
def test_any_sharding_reads_as_any_other(
    case: tuple[dict[str, np.ndarray], dict[str, tuple[Layout, Layout]]], replica: int
) -> None:
    """Every rank of the second sharding gets its bytes from the chunks of the first, each byte once."""
    tensors, shardings = case
    files = write(tensors, {name: saved for name, (saved, _) in shardings.items()}, replica)
    for name, (saved, loading) in shardings.items():
        tensor, whole = tensors[name], Box.whole(tensors[name].shape)
        held = 0
        for rank in loading.ranks:
            for wanted in loading.boxes_of(tensor.shape, rank):
                found = read(files, name, tensor, saved, replica, wanted)
                assert found.tobytes() == tensor[relative_slices(wanted, whole)].tobytes()
                held += wanted.num_elements
        assert held == tensor.size * loading.num_replicas


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """Draw any box inside ``shape``, empty ones too."""
    spans = [draw(st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted)) for n in shape]
    return Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))


@settings(deadline=None)
@given(st.data())
def test_overlapping_finds_what_a_look_at_every_chunk_finds(data: st.DataObject) -> None:
    """Computing the chunks that meet a box is filtering all chunks, for every kind of layout."""
    shape = data.draw(SHAPES)
    layout = data.draw(layouts(shape))
    replica = data.draw(st.integers(0, layout.num_replicas - 1))
    wanted = data.draw(boxes_in(shape))
    chunks = layout.chunks(shape, replica)
    every = [(int(rank), chunks.box(i)) for i, rank in enumerate(chunks.ranks)]
    expected = {pair for pair in every if overlap(pair[1], wanted) is not None}
    found = layout.overlapping(shape, replica, wanted)
    assert len(found) == len(expected)
    assert set(found) == expected


def greedy_boxes(shape: tuple[int, ...], low: int, high: int) -> Iterator[Box]:
    """Cut a range into the largest boxes from the left: as many blocks of one size as their parent has."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    if not shape and low < high:
        yield Box((), ())
        return
    while low < high:
        dim = next(d for d, s in enumerate(strides) if low % s == 0 and low + s <= high)
        stride, length = strides[dim], shape[dim]
        first = low // stride % length
        count = min((high - low) // stride, length - first)
        offsets = [low // s % n for s, n in zip(strides, shape, strict=True)]
        yield Box(tuple(offsets), (*(1,) * dim, count, *shape[dim + 1 :]))
        low += count * stride


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_flat_ranges_are_cut_as_by_brute_force(data: st.DataObject) -> None:
    """A range of elements becomes few boxes, in order, which are exactly its elements."""
    shape = data.draw(SHAPES)
    num_elements = math.prod(shape)
    low, high = sorted(data.draw(st.tuples(*[st.integers(0, num_elements)] * 2)))
    boxes = list(flat_range_boxes(shape, low, high))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)
    numbers = np.arange(num_elements).reshape(shape)
    held = [numbers[relative_slices(box, Box.whole(shape))].reshape(-1) for box in boxes]
    assert np.concatenate([*held, np.empty(0, np.int64)]).tolist() == list(range(low, high))
    assert boxes == list(greedy_boxes(shape, low, high))


def nested_pieces(
    indices: list[int], sizes: list[int], fixed: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[int, ...], list[int]]]:
    """Chunk a dim by the first of ``sizes``, each piece by the next: (position per cut, indices)."""
    if not sizes:
        yield fixed, indices
        return
    step = -(-len(indices) // sizes[0])
    for i in range(sizes[0]):
        yield from nested_pieces(indices[i * step : (i + 1) * step], sizes[1:], (*fixed, i))


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_strided_orders_are_nested_chunks(data: st.DataObject) -> None:
    """Whatever the order of the cuts, a rank holds the piece of a piece that its place in the mesh says."""
    shape = data.draw(SHAPES)
    nest = data.draw(nests(shape))
    layout = nest.layout
    cuts = {d: [a for a in nest.order if layout.placements[a].dim == d] for d in range(len(shape))}
    pieces = {
        dim: dict(nested_pieces(list(range(shape[dim])), [layout.mesh.shape[a] for a in axes]))
        for dim, axes in cuts.items()
    }
    places = itertools.product(*map(range, layout.mesh.shape))
    for rank, place in zip(layout.mesh.ranks, places, strict=True):
        held = [pieces[dim][tuple(place[a] for a in axes)] for dim, axes in cuts.items()]
        box = layout.box_of(shape, rank)
        assert box is not None
        assert box.sizes == tuple(map(len, held))
        if box.num_elements:
            spans = zip(box.offsets, box.sizes, strict=True)
            assert [list(range(start, start + n)) for start, n in spans] == held
