"""What makes a checkpoint exist, which ones are found, and what is noticed when one is read."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest

from fsdp_ckpt.commit.catalog import (
    CheckpointInfo,
    SkippedCheckpoint,
    find_checkpoints,
    list_steps,
    step_folder,
)
from fsdp_ckpt.commit.checkpoint import Checkpoint
from fsdp_ckpt.commit.publish import (
    MANIFEST_KEY,
    new_attempt,
    publish_manifest,
    read_manifest,
    refuse_committed,
    retire_manifest,
)
from fsdp_ckpt.errors import (
    AlreadyCommittedError,
    CheckpointError,
    CorruptCheckpointError,
    NotFoundError,
    StorageError,
    UnsupportedFormatError,
)
from fsdp_ckpt.manifest.schema import FileRow, Manifest, TensorRow, shard_name
from fsdp_ckpt.manifest.shard import ShardHeader
from fsdp_ckpt.plan.box import Box, relative_slices
from fsdp_ckpt.plan.image import BLOCK_BYTES, ImageLayout
from fsdp_ckpt.plan.layouts import Mesh, MeshLayout, Placement
from fsdp_ckpt.storage import Store
from fsdp_ckpt.storage.local import LocalStore
from fsdp_ckpt.storage.shard_io import write_shard

WORLD_SIZE = 2
SHAPE = (5, 7)
LARGE = (BLOCK_BYTES // 4 * 3,)  # bytes of one and a half blocks in each of two shards


def weights(step: int) -> np.ndarray:
    return np.arange(step, step + 35, dtype=np.float32).reshape(SHAPE)


def write_checkpoint(
    store: Store,
    step: int,
    *,
    manifest_step: int | None = None,
    publish: bool = True,
    large: bool = False,
    attempt: str | None = None,
) -> Manifest:
    """Write a checkpoint of two ranks: ``w`` sharded, ``rng`` each rank's own; optionally several blocks."""
    attempt = attempt or new_attempt()
    layout = MeshLayout(Mesh.world(WORLD_SIZE), (Placement(0),))
    tensors = {"w": weights(step)}
    if large:
        tensors["large"] = np.arange(LARGE[0], dtype=np.float32)
    files = []
    for rank in range(WORLD_SIZE):
        boxes = {name: layout.box_of(t.shape, rank) for name, t in tensors.items()}
        chunks = [(n, "F32", tensors[n].shape, box) for n, box in boxes.items() if box is not None]
        image = ImageLayout.pack([*chunks, ("rng", "U8", (3,), Box((0,), (3,)))])
        header = ShardHeader(
            step=step if manifest_step is None else manifest_step,
            attempt=attempt,
            rank=rank,
            world_size=WORLD_SIZE,
            layout=image,
            paths={name: (name,) for name in (*tensors, "rng")},
            own=frozenset({"rng"}),
            values={("seed",): rank},
        )
        data_offset = len(header.to_bytes())
        buffer = bytearray(data_offset + image.data_bytes)
        for entry in image.entries:
            whole = Box.whole(entry.shape)
            held = np.full(3, rank, np.uint8) if entry.name == "rng" else tensors[entry.name]
            chunk = held[relative_slices(entry.box, whole)].tobytes()
            start = data_offset + entry.byte_offset
            buffer[start : start + len(chunk)] = chunk
        name = shard_name(attempt, rank, WORLD_SIZE)
        digest = write_shard(
            store.write(name, len(buffer)),
            memoryview(buffer),
            data_offset=data_offset,
            block_bytes=BLOCK_BYTES,
            seal=sealer(header),
            num_threads=1,
        )
        files.append(
            FileRow(name=name, num_bytes=len(buffer), data_offset=data_offset, digest=digest)
        )
    manifest = Manifest(
        step=step if manifest_step is None else manifest_step,
        attempt=attempt,
        world_size=WORLD_SIZE,
        tensors=tuple(
            TensorRow(path=(name,), dtype="F32", shape=t.shape, layout=layout)
            for name, t in tensors.items()
        ),
        files=tuple(files),
        rank_local=(("rng",), ("seed",)),
        created="2026-01-31T09:30:00+00:00",
    )
    if publish:
        publish_manifest(store, manifest)
    return manifest


def sealer(header: ShardHeader) -> Callable[[Sequence[str]], bytes]:
    return lambda digests: dataclasses.replace(header, digests=tuple(digests)).to_bytes()


class FaultyStore(LocalStore):
    """A local store whose ``create`` fails, before or after it has done its work.

    Args:
        root: As in the base class.
        before: Raised instead of writing.
        after: Raised once it is written: the answer is lost.
        reads_fail: Whether reading back fails too.
    """

    def __init__(
        self,
        root: str,
        *,
        before: CheckpointError | None = None,
        after: CheckpointError | None = None,
        reads_fail: bool = False,
    ) -> None:
        super().__init__(root)
        self._before, self._after, self._reads_fail = before, after, reads_fail
        self.fired = False

    def create(self, key: str, data: bytes) -> None:
        if self._before is not None:
            self.fired = True
            raise self._before
        super().create(key, data)
        if self._after is not None:
            self.fired = True
            raise self._after

    def read(self, key: str, max_bytes: int | None = None) -> bytes:
        if self._reads_fail:
            raise StorageError("unreachable")
        return super().read(key, max_bytes)


@pytest.fixture
def root(tmp_path: pathlib.Path) -> LocalStore:
    return LocalStore(str(tmp_path / "run"))


def folder(root: Store, step: int) -> Store:
    return root.child(step_folder(step))


def overwrite(store: Store, key: str, data: bytes) -> None:
    """Damage an object, as no part of the package ever would."""
    path = pathlib.Path(store.url, key)
    path.unlink()
    path.write_bytes(data)


# --- publishing ---


def test_a_published_manifest_is_the_checkpoint(root: LocalStore) -> None:
    """Before the publish there is no checkpoint, after it there is, with what was written."""
    store = folder(root, 7)
    manifest = write_checkpoint(store, 7, publish=False)
    with pytest.raises(NotFoundError, match="no checkpoint here"):
        read_manifest(store)
    refuse_committed(store, 7)
    publish_manifest(store, manifest)
    assert read_manifest(store) == manifest
    assert list(store.list_files()) == [MANIFEST_KEY]
    with pytest.raises(AlreadyCommittedError, match="exists here already") as caught:
        refuse_committed(store, 7)
    assert caught.value.step == 7


def test_the_second_publisher_is_told(root: LocalStore) -> None:
    """Another attempt at the same step does not replace the first one."""
    store = folder(root, 7)
    first = write_checkpoint(store, 7)
    second = write_checkpoint(store, 7, publish=False)
    with pytest.raises(AlreadyCommittedError) as caught:
        publish_manifest(store, second)
    assert caught.value.step == 7
    assert read_manifest(store) == first
    publish_manifest(store, first)  # who asks again is told that it worked


def test_of_racing_publishers_one_wins(root: LocalStore) -> None:
    """Attempts that publish at the same time agree on one."""
    store = folder(root, 7)
    attempts = [write_checkpoint(store, 7, publish=False) for _ in range(4)]
    start = threading.Barrier(len(attempts))
    winners = []

    def publish(manifest: Manifest) -> None:
        start.wait()
        with suppress(AlreadyCommittedError):
            publish_manifest(LocalStore(store.url), manifest)
            winners.append(manifest)

    with ThreadPoolExecutor(len(attempts)) as threads:
        list(threads.map(publish, attempts))
    assert winners == [read_manifest(store)]


@pytest.mark.parametrize(
    "error", [StorageError("cut"), AlreadyCommittedError("a retry met itself")], ids=repr
)
def test_a_lost_answer_is_no_failure(tmp_path: pathlib.Path, error: CheckpointError) -> None:
    """Where the write succeeded and its answer did not arrive, reading back shows that it is ours."""
    store = FaultyStore(str(tmp_path), after=error)
    manifest = write_checkpoint(store, 7)
    assert store.fired
    assert read_manifest(store) == manifest


def test_a_failed_publish_is_a_failure(tmp_path: pathlib.Path) -> None:
    """Where nothing was written, the store's error is what the caller gets, and there is no checkpoint."""
    error = StorageError("no space")
    store = FaultyStore(str(tmp_path), before=error)
    manifest = write_checkpoint(store, 7, publish=False)
    with pytest.raises(StorageError) as caught:
        publish_manifest(store, manifest)
    assert store.fired
    assert caught.value is error
    with pytest.raises(NotFoundError):
        read_manifest(store)


def test_a_failed_publish_over_another_attempt_says_so(tmp_path: pathlib.Path) -> None:
    """Where the store failed and someone else's manifest is there, it is theirs."""
    first = write_checkpoint(LocalStore(str(tmp_path)), 7)
    store = FaultyStore(str(tmp_path), before=StorageError("cut"))
    with pytest.raises(AlreadyCommittedError):
        publish_manifest(store, write_checkpoint(store, 7, publish=False))
    assert store.fired
    assert read_manifest(store) == first


def test_an_unresolved_answer_is_a_failure(tmp_path: pathlib.Path) -> None:
    """Where reading back fails too, nothing is claimed: the first error is reported."""
    error = StorageError("cut")
    store = FaultyStore(str(tmp_path), after=error, reads_fail=True)
    manifest = write_checkpoint(LocalStore(str(tmp_path)), 7, publish=False)
    with pytest.raises(StorageError) as caught:
        publish_manifest(store, manifest)
    assert store.fired
    assert caught.value is error


def test_a_retired_checkpoint_makes_room_for_another(root: LocalStore) -> None:
    """Its step can be saved again; what was there stays to be looked at, and is no checkpoint any more."""
    store = folder(root, 7)
    retire_manifest(store, None)  # nothing there: nothing to do
    write_checkpoint(store, 7)
    damaged = store.read(MANIFEST_KEY)[:-9]
    overwrite(store, MANIFEST_KEY, damaged)
    retire_manifest(store, None)
    refuse_committed(store, 7)
    assert [store.read(name) for name in store.list_files()] == [damaged]
    second = write_checkpoint(store, 7)
    assert read_manifest(store) == second
    assert steps_of(list(find_checkpoints(root))) == [(7, True)]


def test_attempts_have_names_of_their_own() -> None:
    """Attempt ids are unique, sort by time, and are file names that a manifest accepts."""
    attempts = [new_attempt() for _ in range(1000)]
    assert len(set(attempts)) == 1000
    times = [attempt.partition("-")[0] for attempt in attempts]
    assert times == sorted(times)
    assert all(re.fullmatch(r"\d{8}T\d{12}-[0-9a-f]{12}", attempt) for attempt in attempts)


# --- the catalog ---


def steps_of(found: Sequence[CheckpointInfo | SkippedCheckpoint]) -> list[tuple[int, bool]]:
    return [(entry.step, isinstance(entry, CheckpointInfo)) for entry in found]


def test_checkpoints_are_found_newest_first(root: LocalStore) -> None:
    """Order is by number of steps, however many digits, and each says what it is."""
    steps = [500, 0, 999_999_999, 1_000_000_000, 499]
    manifests = {step: write_checkpoint(folder(root, step), step) for step in steps}
    found = list(find_checkpoints(root))
    assert steps_of(found) == [(step, True) for step in sorted(steps, reverse=True)]
    assert list_steps(root) == sorted(steps, reverse=True)
    (newest, *_) = found
    manifest = manifests[1_000_000_000]
    assert newest == CheckpointInfo(
        step=1_000_000_000,
        attempt=manifest.attempt,
        generation=0,
        world_size=WORLD_SIZE,
        num_bytes=sum(f.num_bytes for f in manifest.files),
        created="2026-01-31T09:30:00+00:00",
        url=f"{root.url}/step-1000000000",
    )


def test_a_root_without_checkpoints_is_empty(root: LocalStore) -> None:
    """An absent root and one of other things hold no checkpoint."""
    assert list(find_checkpoints(root)) == []
    root.create("logs/events", b"")
    root.create("step-000000005", b"a file")
    assert list(find_checkpoints(root)) == []


@pytest.mark.parametrize(
    "name",
    [
        "step-5", "step-00000005", "step-0000000005", "step-000000005x", "step-000000005.tmp",
        "step-+00000005", "xstep-000000005", "step-00000000\N{ARABIC-INDIC DIGIT FIVE}", "STEP-000000005",
        "step_000000005", "step-0000000000000000005", "step--00000005", "000000005", "step-000000005 ",
    ],
)  # fmt: skip
def test_foreign_folders_are_ignored(root: LocalStore, name: str) -> None:
    """Only names that this package writes are steps, whatever lies in folders of other names."""
    write_checkpoint(root.child(name), 5)
    assert list_steps(root) == []
    write_checkpoint(folder(root, 4), 4)
    assert steps_of(list(find_checkpoints(root))) == [(4, True)]


def test_torn_attempts_are_passed_over(root: LocalStore) -> None:
    """A save that died before its commit is seen, and is never a checkpoint."""
    write_checkpoint(folder(root, 1), 1)
    write_checkpoint(folder(root, 2), 2, publish=False)
    folder(root, 3).create("20260131T093000-1b9d6bcd/rank-00000-of-00002.safetensors", b"half")
    pathlib.Path(folder(root, 4).url).mkdir()
    newest = list(find_checkpoints(root))
    assert steps_of(newest) == [(4, False), (3, False), (2, False), (1, True)]
    for skipped in newest[:3]:
        assert isinstance(skipped, SkippedCheckpoint)
        assert skipped.torn
        assert "no manifest" in skipped.reason


def shard_path(root: Store, step: int, rank: int) -> pathlib.Path:
    return pathlib.Path(folder(root, step).url, read_manifest(folder(root, step)).files[rank].name)


def truncate_manifest(root: Store) -> None:
    store = folder(root, 2)
    overwrite(store, MANIFEST_KEY, store.read(MANIFEST_KEY)[:-1])


def empty_manifest(root: Store) -> None:
    overwrite(folder(root, 2), MANIFEST_KEY, b"")


def make_manifest_newer(root: Store) -> None:
    overwrite(folder(root, 2), MANIFEST_KEY, b'{"format":"fsdp_ckpt","version":9}')


def swap_step(root: Store) -> None:
    pathlib.Path(folder(root, 2).url).rename(pathlib.Path(root.url, "elsewhere"))
    write_checkpoint(folder(root, 2), 2, manifest_step=1)


def lose_shard(root: Store) -> None:
    shard_path(root, 2, 1).unlink()


def lose_attempt(root: Store) -> None:
    shard_path(root, 2, 1).parent.rename(pathlib.Path(folder(root, 2).url, "elsewhere"))


def truncate_shard(root: Store) -> None:
    path = shard_path(root, 2, 1)
    path.write_bytes(path.read_bytes()[:-1])


def extend_shard(root: Store) -> None:
    path = shard_path(root, 2, 1)
    path.write_bytes(path.read_bytes() + b"\0")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncate_manifest, r"not JSON"),
        (empty_manifest, r"not JSON"),
        (make_manifest_newer, r"version 9 is newer .* upgrade"),
        (swap_step, r"the manifest is of step 1"),
        (
            lose_shard,
            r"step 2: the shard of rank 1, .*rank-00001-of-00002.safetensors, is damaged: it is missing",
        ),
        (lose_attempt, r"step 2: the shard of rank 0, .* is damaged: it is missing; it holds w"),
        (truncate_shard, r"step 2: the shard of rank 1, .* bytes, \d+ expected; it holds w"),
        (extend_shard, r"step 2: the shard of rank 1, .* bytes, \d+ expected; it holds w"),
    ],
)
def test_damaged_checkpoints_are_skipped_with_the_reason(
    root: LocalStore, damage: Callable[[Store], None], words: str
) -> None:
    """One that was committed and is not whole any more is passed over, and is told apart from a torn one."""
    write_checkpoint(folder(root, 1), 1)
    write_checkpoint(folder(root, 2), 2)
    assert steps_of(list(find_checkpoints(root))) == [(2, True), (1, True)]
    damage(root)
    skipped, whole = find_checkpoints(root)
    assert isinstance(whole, CheckpointInfo)
    assert whole.step == 1
    assert isinstance(skipped, SkippedCheckpoint)
    assert (skipped.step, skipped.torn, skipped.newer) == (2, False, damage is make_manifest_newer)
    assert re.search(words, skipped.reason)
    assert len(skipped.reason.splitlines()) == 1


def test_what_cannot_be_read_now_is_not_damage(root: LocalStore) -> None:
    """A store that fails is an error, for the root and for a manifest, and only when it is reached."""
    for step in (1, 2):
        write_checkpoint(folder(root, step), step)
    unreadable = pathlib.Path(folder(root, 1).url, MANIFEST_KEY)
    unreadable.unlink()
    unreadable.mkdir()
    found = find_checkpoints(root)
    assert isinstance(next(found), CheckpointInfo)
    with pytest.raises(StorageError):
        next(found)
    with pytest.raises(StorageError):
        list(find_checkpoints(root.child(f"{step_folder(2)}/{MANIFEST_KEY}")))


# --- reading ---


def read_box(checkpoint: Checkpoint, name: str, wanted: Box) -> np.ndarray:
    """Read a box of an F32 tensor, piece by piece."""
    row = checkpoint.rows[name]
    result = np.full(wanted.sizes, np.nan, np.float32)
    pieces = checkpoint.pieces(row, wanted)
    images = checkpoint.read(pieces)
    for piece in pieces:
        data = np.ascontiguousarray(images.array(piece)).view(np.float32)[..., 0]
        result[relative_slices(piece.region, wanted)] = data
    return result


@pytest.mark.parametrize(
    "wanted",
    [
        Box((0, 0), (5, 7)),
        Box((2, 0), (1, 7)),
        Box((1, 3), (3, 2)),
        Box((4, 6), (1, 1)),
        Box((0, 0), (0, 7)),
    ],
)
def test_any_box_reads_back(root: LocalStore, wanted: Box) -> None:
    """Any part of a tensor is put together from the shards that hold it, to the bit."""
    write_checkpoint(root, 7)
    checkpoint = Checkpoint.open(root)
    checkpoint.check_files()
    expected = weights(7)[relative_slices(wanted, Box.whole(SHAPE))]
    assert read_box(checkpoint, "w", wanted).tobytes() == expected.tobytes()


def test_several_blocks_read_back(root: LocalStore) -> None:
    """Tensors across blocks and shards come back, and only the files that hold the box are opened."""
    manifest = write_checkpoint(root, 7, large=True)
    expected = np.arange(LARGE[0], dtype=np.float32)
    middle = LARGE[0] // 2
    for wanted in (Box((0,), LARGE), Box((middle - 5,), (10,)), Box((BLOCK_BYTES // 4 - 1,), (2,))):
        found = read_box(Checkpoint.open(root), "large", wanted)
        assert found.tobytes() == expected[relative_slices(wanted, Box.whole(LARGE))].tobytes()
    pathlib.Path(root.url, manifest.files[1].name).unlink()
    first = read_box(Checkpoint.open(root), "large", Box((0,), (middle,)))
    assert first.tobytes() == expected[:middle].tobytes()


def test_each_rank_has_its_own(root: LocalStore) -> None:
    """What is rank-local comes from that rank's file, tensors and values."""
    write_checkpoint(root, 7)
    checkpoint = Checkpoint.open(root)
    for rank in range(WORLD_SIZE):
        piece = checkpoint.own_piece(rank, "rng")
        assert piece is not None
        assert checkpoint.read([piece]).array(piece).reshape(-1).tolist() == [rank] * 3
        assert checkpoint.header(rank).values == {("seed",): rank}
        assert checkpoint.own_piece(rank, "w") is None
        assert checkpoint.holdings(rank) == "w"


def check_damage(root: Store, rank: int, words: str) -> None:
    """Reading everything fails; the error names step, rank, file and tensor."""
    checkpoint = Checkpoint.open(root)
    with pytest.raises(CorruptCheckpointError, match=words) as caught:
        read_box(checkpoint, "w", Box.whole(SHAPE))
    error = caught.value
    assert (error.step, error.rank) == (7, rank)
    assert error.key == checkpoint.manifest.files[rank].name
    for part in ("step 7", f"rank {rank}", checkpoint.manifest.files[rank].name, "it holds w"):
        assert part in str(error)


@pytest.mark.parametrize("rank", range(WORLD_SIZE))
def test_a_flipped_bit_anywhere_in_a_shard_is_noticed(root: LocalStore, rank: int) -> None:
    """Length field, header, padding and data are all covered by digests."""
    manifest = write_checkpoint(root, 7)
    file = manifest.files[rank]
    whole = root.read(file.name)
    for at in (
        *range(0, file.data_offset, 97),
        file.data_offset - 1,
        *range(file.data_offset, len(whole)),
    ):
        damaged = bytearray(whole)
        damaged[at] ^= 0x10
        overwrite(root, file.name, bytes(damaged))
        check_damage(root, rank, "digest")
    overwrite(root, file.name, whole)
    assert read_box(Checkpoint.open(root), "w", Box.whole(SHAPE)).tobytes() == weights(7).tobytes()


@pytest.mark.parametrize("keep", [0, 8, 4095, 4096, -1])
def test_truncated_shards_are_noticed(root: LocalStore, keep: int) -> None:
    """A shard that lost its end, or nearly everything, is damage and not a failing store."""
    file = write_checkpoint(root, 7).files[1]
    overwrite(root, file.name, root.read(file.name)[:keep])
    check_damage(root, 1, "it has [0-9]+ of [0-9]+ bytes")


def test_missing_shards_are_noticed(root: LocalStore) -> None:
    """A shard that is gone is damage, and not an absent checkpoint."""
    root.delete(write_checkpoint(root, 7).files[0].name)
    check_damage(root, 0, "it is missing")


def test_shards_of_another_rank_or_save_are_noticed(root: LocalStore) -> None:
    """Files that are whole but not the ones that were committed do not mix."""
    manifest = write_checkpoint(root, 7)
    first, second = (root.read(file.name) for file in manifest.files)
    overwrite(root, manifest.files[0].name, second)
    check_damage(root, 0, "digest")
    overwrite(root, manifest.files[0].name, first)
    other = root.child("other")
    twin = write_checkpoint(other, 7)
    overwrite(root, manifest.files[0].name, other.read(twin.files[0].name))
    check_damage(root, 0, "digest")
    # Even with a manifest that knows no better.
    swapped = dataclasses.replace(manifest, files=(twin.files[0], manifest.files[1]))
    shard = pathlib.Path(root.url, twin.files[0].name)
    shard.parent.mkdir()
    shard.write_bytes(other.read(twin.files[0].name))
    overwrite(root, MANIFEST_KEY, swapped.to_bytes())
    check_damage(root, 0, "another save")


def test_chunks_that_a_shard_lacks_are_noticed(root: LocalStore) -> None:
    """A manifest and shards that are each whole but do not fit together give no tensor."""
    manifest = write_checkpoint(root, 7)
    (row,) = manifest.tensors
    for changed in (
        dataclasses.replace(row, dtype="I32"),
        dataclasses.replace(row, shape=(6, 7)),
        dataclasses.replace(row, path=("v",)),
        dataclasses.replace(row, layout=MeshLayout(Mesh.world(WORLD_SIZE), (Placement(1),))),
    ):
        overwrite(root, MANIFEST_KEY, dataclasses.replace(manifest, tensors=(changed,)).to_bytes())
        checkpoint = Checkpoint.open(root)
        (name,) = checkpoint.rows
        with pytest.raises(CorruptCheckpointError, match=f"lacks the chunk of {name}") as caught:
            read_box(checkpoint, name, Box((0, 0), (1, 1)))
        assert caught.value.key == name


def test_newer_checkpoints_ask_for_an_upgrade(root: LocalStore) -> None:
    """Opening one by name says what to do, rather than that it is damaged."""
    write_checkpoint(folder(root, 2), 2)
    make_manifest_newer(root)
    with pytest.raises(UnsupportedFormatError, match="upgrade"):
        Checkpoint.open(folder(root, 2))
    with pytest.raises(NotFoundError):
        Checkpoint.open(folder(root, 3))
