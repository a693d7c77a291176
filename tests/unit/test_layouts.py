"""Layouts against torch's own cuts, and coverage against counting every element."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from fsdp_ckpt.errors import CheckpointError, CorruptCheckpointError, UnencodableStateError
from fsdp_ckpt.plan.box import Box, overlap, relative_slices
from fsdp_ckpt.plan.coverage import check_coverage
from fsdp_ckpt.plan.layouts import FlatLayout, Layout, ListedLayout, Mesh, MeshLayout, Placement

SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 5, 7, 8, 13]), max_size=3).map(tuple)


@dataclass(frozen=True)
class Case:
    """A mesh layout, and the order of its cuts as it was made up."""

    shape: tuple[int, ...]
    layout: MeshLayout
    order: tuple[int, ...]


@st.composite
def cases(draw: st.DrawFn, *, even: bool = False, strided: bool = True) -> Case:
    """Draw a shape and a mesh layout for it.

    Axes are taken from the last to the first. Each is put before the cuts there are, or, strided, behind some
    of them.
    """
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    shape = draw(SHAPES)
    cuts: dict[int | None, list[int]] = {dim: [] for dim in (None, *range(len(shape)))}
    placements: list[Placement] = []
    for axis in reversed(range(len(mesh_shape))):
        dim = draw(st.sampled_from(list(cuts)))
        behind = draw(st.integers(0, len(cuts[dim]))) if strided and dim is not None else 0
        split = math.prod(mesh_shape[i] for i in cuts[dim][:behind])
        cuts[dim].insert(behind, axis)
        placements.insert(0, Placement(dim, split))
    if even:
        factors = draw(st.tuples(*(st.integers(1, 3) for _ in shape)))
        shape = tuple(n * math.prod(mesh_shape[i] for i in cuts[d]) for d, n in enumerate(factors))
    ranks = draw(st.permutations(range(math.prod(mesh_shape))))
    first = draw(st.integers(0, 5))
    mesh = Mesh(mesh_shape, tuple(first + rank for rank in ranks))
    order = tuple(i for dim, axes in cuts.items() if dim is not None for i in axes)
    return Case(shape, MeshLayout(mesh, tuple(placements)), order)


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    """Return a tensor whose elements are their own row-major positions."""
    return np.arange(math.prod(shape)).reshape(shape)


def elements_of(box: Box, shape: tuple[int, ...]) -> np.ndarray:
    return numbered(shape)[relative_slices(box, Box.whole(shape))]


def coordinates(mesh: Mesh) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield (rank, position along each axis)."""
    yield from zip(mesh.ranks, itertools.product(*map(range, mesh.shape)), strict=True)


def cut_by_torch(case: Case, position: tuple[int, ...]) -> torch.Tensor:
    """Return what a rank holds: ``torch.chunk`` after ``torch.chunk``."""
    local = torch.from_numpy(numbered(case.shape))
    for axis in case.order:
        dim = case.layout.placements[axis].dim
        assert dim is not None
        pieces = torch.chunk(local, case.layout.mesh.shape[axis], dim)
        i = position[axis]
        local = pieces[i] if i < len(pieces) else local.narrow(dim, 0, 0)
    return local


def hits(case_shape: tuple[int, ...], layout: Layout, replica: int) -> np.ndarray:
    """Count how often each element is held."""
    chunks = layout.chunks(case_shape, replica)
    count = np.zeros(math.prod(case_shape), np.int64)
    for i in range(len(chunks)):
        assert chunks.box(i).num_elements
        np.add.at(count, elements_of(chunks.box(i), case_shape).reshape(-1), 1)
    return count


@settings(deadline=None)
@given(cases())
@example(Case((), MeshLayout(Mesh.world(4), (Placement(),)), ()))
@example(Case((1,), MeshLayout(Mesh.world(4), (Placement(0),)), (0,)))
@example(Case((0, 3), MeshLayout(Mesh.world(4), (Placement(0),)), (0,)))
@example(Case((5,), MeshLayout(Mesh.world(4), (Placement(0),)), (0,)))
@example(
    Case((9,), MeshLayout(Mesh((4, 2), tuple(range(8))), (Placement(0, 2), Placement(0))), (1, 0))
)
def test_every_rank_holds_what_torch_chunks_for_it(case: Case) -> None:
    """A rank's box is ``torch.chunk`` along each mesh axis, with the last ranks short or empty."""
    for rank, position in coordinates(case.layout.mesh):
        expected = cut_by_torch(case, position)
        box = case.layout.box_of(case.shape, rank)
        assert box is not None
        assert box.sizes == tuple(expected.shape)
        if box.num_elements:
            np.testing.assert_array_equal(elements_of(box, case.shape), expected.numpy())
        assert case.layout.boxes_of(case.shape, rank) == ([box] if box.num_elements else [])


@settings(deadline=None)
@given(cases(strided=False))
def test_dtensors_are_cut_alike(case: Case) -> None:
    """DTensor's own arithmetic gives the same offsets and sizes, for every way to cut without strides."""
    check_against_dtensor(case)


@settings(deadline=None)
@given(cases(even=True))
def test_strided_dtensors_are_cut_alike(case: Case) -> None:
    """Strided shards agree with DTensor's arithmetic too, where the cuts are even.

    Where they are not, DTensor's arithmetic differs from what FSDP2 does, which this package follows.
    """
    check_against_dtensor(case)


def check_against_dtensor(case: Case) -> None:
    placements = [
        Replicate()
        if p.dim is None
        else Shard(p.dim)
        if p.split == 1
        else _StridedShard(p.dim, split_factor=p.split)
        for p in case.layout.placements
    ]
    for rank, position in coordinates(case.layout.mesh):
        sizes, offsets = _compute_local_shape_and_global_offset(
            case.shape, case.layout.mesh.shape, list(position), placements
        )
        box = case.layout.box_of(case.shape, rank)
        assert box is not None
        assert box.sizes == tuple(sizes)
        if box.num_elements:
            assert box.offsets == tuple(offsets)


@settings(deadline=None)
@given(cases())
def test_chunks_of_each_replica_cover_every_element_once(case: Case) -> None:
    """All chunks of one replica together are the tensor, and each is the box of the rank it names."""
    layout, shape = case.layout, case.shape
    for replica in range(layout.num_replicas):
        check_coverage("w", shape, layout, replica)
        assert (hits(shape, layout, replica) == 1).all()
        chunks = layout.chunks(shape, replica)
        held = {rank: layout.box_of(shape, rank) for rank in layout.replica_ranks[replica].tolist()}
        found = {int(rank): chunks.box(i) for i, rank in enumerate(chunks.ranks)}
        assert found == {rank: box for rank, box in held.items() if box and box.num_elements}


@settings(deadline=None)
@given(cases())
def test_replicas_hold_the_same(case: Case) -> None:
    """Replicas share out the mesh's ranks; ranks at the same place of each hold the same box."""
    layout = case.layout
    axes = zip(layout.mesh.shape, layout.placements, strict=True)
    assert layout.num_replicas == math.prod(n for n, p in axes if p.dim is None)
    assert sorted(layout.replica_ranks.reshape(-1).tolist()) == sorted(layout.ranks)
    for replica, ranks in enumerate(layout.replica_ranks):
        assert {layout.replica_of(rank) for rank in ranks.tolist()} == {replica}
    for ranks in layout.replica_ranks.T:
        assert len({layout.box_of(case.shape, rank) for rank in ranks.tolist()}) == 1


@settings(deadline=None)
@given(cases())
def test_a_rank_outside_the_mesh_holds_nothing(case: Case) -> None:
    """Ranks outside the mesh have no box and no replica."""
    outside = max(case.layout.mesh.ranks) + 1
    assert case.layout.box_of(case.shape, outside) is None
    assert case.layout.boxes_of(case.shape, outside) == []
    assert case.layout.replica_of(outside) is None


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """Draw any box inside ``shape``, empty ones too."""
    spans = [draw(st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted)) for n in shape]
    return Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))


def check_overlapping(layout: Layout, shape: tuple[int, ...], replica: int, wanted: Box) -> None:
    chunks = layout.chunks(shape, replica)
    every = [(int(rank), chunks.box(i)) for i, rank in enumerate(chunks.ranks)]
    expected = [pair for pair in every if overlap(pair[1], wanted) is not None]
    found = layout.overlapping(shape, replica, wanted)
    assert sorted(found, key=repr) == sorted(expected, key=repr)
    assert [every[i] for i in chunks.overlapping(wanted).tolist()] == expected


@settings(deadline=None)
@given(cases(), st.data())
def test_chunks_that_meet_a_box_are_found(case: Case, data: st.DataObject) -> None:
    """Computing the chunks that meet a box finds those that a look at every chunk finds."""
    replica = data.draw(st.integers(0, case.layout.num_replicas - 1))
    check_overlapping(case.layout, case.shape, replica, data.draw(boxes_in(case.shape)))


@st.composite
def flat_groups(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], list[FlatLayout]]:
    """Draw the tensors of a flat group, and where each lies in it."""
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=4))
    mesh_shape = (draw(st.integers(1, 2)), draw(st.integers(1, 5)))
    total = sum(math.prod(shape) for shape in shapes)
    shard_elements = max(-(-total // mesh_shape[1]), 1) + draw(st.integers(0, 2))
    ranks = tuple(draw(st.permutations(range(math.prod(mesh_shape)))))
    starts = itertools.accumulate((math.prod(shape) for shape in shapes), initial=0)
    mesh = Mesh(mesh_shape, ranks)
    return shapes, [
        FlatLayout(mesh, shard_elements, start) for start in itertools.islice(starts, len(shapes))
    ]


@settings(deadline=None)
@given(flat_groups())
def test_flat_shards_are_slices_of_the_flat_group(
    group: tuple[list[tuple[int, ...]], list[FlatLayout]],
) -> None:
    """What a rank holds of each tensor, end to end, is its slice of all tensors flattened together."""
    shapes, layouts = group
    numbers = itertools.count()
    tensors = [np.array([next(numbers) for _ in range(math.prod(s))]).reshape(s) for s in shapes]
    flat = np.concatenate([t.reshape(-1) for t in tensors])
    mesh, size = layouts[0].mesh, layouts[0].shard_elements
    for rank, (replica, shard) in coordinates(mesh):
        held = [
            tensor[relative_slices(box, Box.whole(shape))].reshape(-1)
            for tensor, shape, layout in zip(tensors, shapes, layouts, strict=True)
            for box in layout.boxes_of(shape, rank)
        ]
        expected = flat[shard * size : (shard + 1) * size]
        np.testing.assert_array_equal(np.concatenate([*held, np.empty(0, np.int64)]), expected)
        assert layouts[0].replica_of(rank) == replica
        assert layouts[0].replica_ranks[replica, shard] == rank


@settings(deadline=None)
@given(flat_groups(), st.data())
def test_flat_chunks_cover_every_element_once(
    group: tuple[list[tuple[int, ...]], list[FlatLayout]], data: st.DataObject
) -> None:
    """Each replica of a flat group holds every tensor once, in few boxes, which a box of interest finds."""
    for shape, layout in zip(*group, strict=True):
        for replica in range(layout.num_replicas):
            check_coverage("w", shape, layout, replica)
            assert (hits(shape, layout, replica) == 1).all()
            check_overlapping(layout, shape, replica, data.draw(boxes_in(shape)))
        for rank in layout.ranks:
            low, high = layout.range_of(shape, rank)
            assert 0 <= low <= high <= math.prod(shape)
            boxes = layout.boxes_of(shape, rank)
            assert sum(box.num_elements for box in boxes) == high - low
            assert len(boxes) <= max(2 * len(shape) - 1, 1)


def test_a_flat_group_too_small_is_refused() -> None:
    """A tensor that reaches beyond the last shard is not covered."""
    mesh = Mesh((1, 4), (0, 1, 2, 3))
    check_coverage("w", (8,), FlatLayout(mesh, 2), 0)
    for layout in (FlatLayout(mesh, 1), FlatLayout(mesh, 2, 1)):
        with pytest.raises(CorruptCheckpointError, match="w: elements"):
            check_coverage("w", (8,), layout, 0)


@settings(deadline=None)
@given(
    st.one_of(
        st.just(Placement()), st.builds(Placement, st.integers(0, 999), st.integers(1, 10**9 - 1))
    )
)
def test_placements_survive_as_text(placement: Placement) -> None:
    """A placement comes back from its text."""
    assert Placement.parse(str(placement)) == placement


@pytest.mark.parametrize(
    "text", ["", "S", "R0", "S-1", "S0/", "S0/-2", "S1000", "s0", "S0 ", "S0/2/2"]
)
def test_malformed_placements_are_refused(text: str) -> None:
    """What is no placement is damage, not a crash."""
    with pytest.raises(CorruptCheckpointError, match="unknown placement"):
        Placement.parse(text)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Mesh((2, 2), (0, 1, 2)),
        lambda: Mesh((2,), (1, 1)),
        lambda: Mesh((), (0,)),
        lambda: MeshLayout(Mesh.world(2), ()),
        lambda: MeshLayout(Mesh.world(2), (Placement(), Placement())),
        lambda: MeshLayout(Mesh.world(2), (Placement(1),)).box_of((4,), 0),
        lambda: MeshLayout(Mesh.world(2), (Placement(1),)).chunks((4,), 0),
        lambda: check_coverage("w", (4,), MeshLayout(Mesh.world(2), (Placement(1),)), 0),
        lambda: check_coverage("w", (), MeshLayout(Mesh.world(2), (Placement(0),)), 0),
        lambda: check_coverage("w", (4,), MeshLayout(Mesh.world(2), (Placement(0),)), 1),
        lambda: check_coverage("w", (4,), MeshLayout(Mesh.world(2), (Placement(),)), 2),
        lambda: check_coverage("w", (), ListedLayout(((0, Box((), ())),)), 1),
        lambda: FlatLayout(Mesh.world(2), 4),
        lambda: FlatLayout(Mesh((1, 2), (0, 1)), 0),
        lambda: FlatLayout(Mesh((1, 2), (0, 1)), 1, -1),
    ],
)
def test_layouts_that_make_no_sense_are_refused(build: Callable[[], object]) -> None:
    """Contradictions between mesh, placements, shape and replica are damage."""
    with pytest.raises(CorruptCheckpointError):
        build()


@pytest.mark.parametrize("split", [0, 3, 4])
def test_a_strided_shard_must_match_its_mesh(split: int) -> None:
    """A strided shard over pieces that no later axes make is refused wherever it is first used."""
    layout = MeshLayout(Mesh((2, 2), (0, 1, 2, 3)), (Placement(0, split), Placement(0)))
    for use in (
        lambda: layout.box_of((8,), 0),
        lambda: layout.chunks((8,), 0),
        lambda: check_coverage("w", (8,), layout, 0),
    ):
        with pytest.raises(UnencodableStateError, match="strided"):
            use()


def test_listed_chunks_stand_as_they_are() -> None:
    """A listed layout keeps its chunks in order, leaves out empty ones, and has one replica."""
    boxes = [Box((0, 0), (2, 3)), Box((2, 0), (0, 3)), Box((2, 0), (1, 3))]
    layout = ListedLayout.of((7 - i, box) for i, box in enumerate(boxes))
    chunks = layout.chunks((3, 3), 0)
    assert [(int(r), chunks.box(i)) for i, r in enumerate(chunks.ranks)] == [
        (7, boxes[0]),
        (5, boxes[2]),
    ]
    assert layout.num_replicas == 1
    assert layout.ranks == (7, 5)
    assert [layout.replica_of(rank) for rank in (5, 6, 7)] == [0, None, 0]
    assert layout.boxes_of((3, 3), 5) == [boxes[2]]
    assert len(ListedLayout.of([]).chunks((0, 3), 0)) == 0
    check_overlapping(layout, (3, 3), 0, Box((1, 1), (2, 1)))


@st.composite
def partitions(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """Draw a shape and boxes that together are all of it, by cutting boxes in two."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dims = [d for d, n in enumerate(box.sizes) if n > 1]
        if not dims:
            boxes.append(box)
            continue
        dim = draw(st.sampled_from(dims))
        at = draw(st.integers(1, box.sizes[dim] - 1))
        for start, size in ((0, at), (at, box.sizes[dim] - at)):
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[dim] += start
            sizes[dim] = size
            boxes.append(Box(tuple(offsets), tuple(sizes)))
    return shape, draw(st.permutations(boxes))


def is_covered(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    """Count every element; an element outside does not count as held."""
    held = [
        tuple(a + i for a, i in zip(box.offsets, index, strict=True))
        for box in boxes
        for index in np.ndindex(*box.sizes)
    ]
    return sorted(held) == sorted(np.ndindex(*shape))


@settings(deadline=None)
@given(partitions(), st.data())
def test_coverage_agrees_with_counting(
    partition: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    """Listed chunks pass if and only if every element is in exactly one of them."""
    shape, boxes = partition
    assert is_covered(shape, boxes)
    check_coverage("w", shape, ListedLayout.of((0, box) for box in boxes), 0)
    i = data.draw(st.integers(0, len(boxes) - 1))
    deltas = st.tuples(*(st.integers(-1, 1) for _ in shape))
    moved = tuple(max(a + d, 0) for a, d in zip(boxes[i].offsets, data.draw(deltas), strict=True))
    resized = tuple(max(n + d, 1) for n, d in zip(boxes[i].sizes, data.draw(deltas), strict=True))
    changed = [*boxes[:i], Box(moved, resized), *boxes[i + 1 :]]
    layout = ListedLayout.of((0, box) for box in changed)
    if is_covered(shape, changed):
        check_coverage("w", shape, layout, 0)
    else:
        with pytest.raises(CorruptCheckpointError, match=r"^w: "):
            check_coverage("w", shape, layout, 0)


@settings(deadline=None)
@given(partitions(), st.data())
def test_lost_and_doubled_chunks_are_refused(
    partition: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    """A tensor that lacks a chunk or has one twice is not whole."""
    shape, boxes = partition
    i = data.draw(st.integers(0, len(boxes) - 1))
    for wrong in ([*boxes[:i], *boxes[i + 1 :]], [*boxes, boxes[i]]):
        with pytest.raises(CorruptCheckpointError, match=r"^w: "):
            check_coverage("w", shape, ListedLayout.of((0, box) for box in wrong), 0)


@pytest.mark.parametrize(
    ("shape", "boxes", "words"),
    [
        ((4,), [Box((0,), (4,)), Box((4,), (1,))], "outside"),
        ((4,), [Box((2**63 - 2,), (4,))], "outside"),
        ((4,), [Box((0,), (2,)), Box((1,), (2,))], "overlap"),
        ((4,), [Box((0,), (3,))], "3 of 4"),
        ((2, 2), [Box((0, 0), (2, 1)), Box((0, 1), (1, 1))], "3 of 4"),
        ((2**40, 2**40), [Box((0, 0), (2**40, 2**39))], "of 12089258"),
        ((), [Box((), ()), Box((), ())], "overlap"),
        ((), [], "0 of 1"),
    ],
)
def test_coverage_says_what_is_wrong(shape: tuple[int, ...], boxes: list[Box], words: str) -> None:
    """Gaps, overlaps and chunks outside are named, however large the numbers are."""
    with pytest.raises(CheckpointError, match=words) as caught:
        check_coverage("w", shape, ListedLayout(tuple((0, box) for box in boxes)), 0)
    assert caught.value.key == "w"


def test_a_layout_of_many_ranks_is_quick_to_compare() -> None:
    """Equal meshes are one key: a manifest names each once, however many tensors use it."""
    layouts = {MeshLayout(Mesh.world(4096), (Placement(0),)): i for i in range(3)}
    assert list(layouts.values()) == [2]
    assert MeshLayout(Mesh.world(4096), (Placement(1),)) not in layouts
