"""Attempts whose files are all there, but whose job died before it could publish.

Every shard file says what it is, and its header is written last: a header that is there and fits its file
means that the file is whole. Rank 0's header holds a spare of the manifest. So files alone tell whether an
attempt can be published, and the manifest is rebuilt from them.

Invariant: an attempt from before the first checkpoint of a later job is never published (see ``fence``), nor
one of a branch that the run has left (see ``branches``).
"""

from __future__ import annotations

import re

from fsdp_ckpt.commit.branches import BranchHistory
from fsdp_ckpt.commit.fence import Fences
from fsdp_ckpt.commit.spareless import manifest_of_headers
from fsdp_ckpt.errors import CorruptCheckpointError, NotFoundError
from fsdp_ckpt.manifest.schema import FileRow, Manifest, shard_name
from fsdp_ckpt.manifest.shard import MAX_HEADER_BYTES, ShardHeader
from fsdp_ckpt.manifest.tree import path_to_json
from fsdp_ckpt.storage.shard_io import digest
from fsdp_ckpt.storage.store import Store

__all__ = ["find_complete_attempt", "rebuild_manifest"]

_RANK_FILE = re.compile(r"rank-(\d{5,})-of-(\d{5,})\.safetensors", re.ASCII)


def find_complete_attempt(
    store: Store, fences: Fences, history: BranchHistory | None = None
) -> Manifest | None:
    """Return the manifest of the newest attempt of a step whose files are all whole.

    Args:
        store: The step's folder, without a manifest.
        fences: Of the run's root.
        history: Its rollbacks, where there may be some.

    Returns:
        What can be published; ``None`` where no attempt is complete.

    Raises:
        StorageError: The store cannot be read now.
    """
    for attempt in reversed(store.list_folders()):
        if fences.is_dead(attempt):
            continue
        try:
            manifest = rebuild_manifest(store, attempt)
        except (CorruptCheckpointError, NotFoundError):
            continue
        if not history or not history.abandoned_by(manifest.generation, manifest.step):
            return manifest
    return None


def rebuild_manifest(store: Store, attempt: str, *, needs_spare: bool = True) -> Manifest:
    """Rebuild the manifest of an attempt from its shard files alone.

    Args:
        store: The step's folder.
        attempt: Id of the attempt.
        needs_spare: Whether rank 0's file must hold a spare of it. Without one, whether a save had all of its
            ranks agree before it died is not known; chunks that cover every tensor are then enough.

    Raises:
        NotFoundError: A rank's file is not there.
        CorruptCheckpointError: A file is not whole, or they do not make one checkpoint.
        StorageError: The store cannot be read now.
    """
    sizes = store.child(attempt).list_files()
    found = {int(m[1]): int(m[2]) for m in map(_RANK_FILE.fullmatch, sizes) if m}
    where = f"{store.url}/{attempt}"
    world_size = found.get(0, 0)
    missing = sorted(set(range(world_size)) - set(found))
    if not world_size or missing:
        absent = ", ".join(map(str, missing[:8])) or "0"
        raise NotFoundError(f"{where}: the file of rank {absent} is not there", key=attempt)
    headers: list[ShardHeader] = []
    rows: list[FileRow] = []
    for rank in range(world_size):
        name = shard_name(attempt, rank, world_size)
        header, row = _read_header(store, name, sizes.get(name.rpartition("/")[2], 0))
        if (header.attempt, header.rank, header.world_size) != (attempt, rank, world_size):
            raise CorruptCheckpointError(
                f"{store.url}/{name}: says that it is rank {header.rank} of {header.world_size} of attempt "
                f"{header.attempt}",
                key=name,
                rank=rank,
            )
        headers.append(header)
        rows.append(row)
    steps, spare = {header.step for header in headers}, headers[0].manifest
    if len(steps) == 1 and spare is None and not needs_spare:
        return manifest_of_headers(headers, rows, where)
    if len(steps) != 1 or not isinstance(spare, dict):
        raise CorruptCheckpointError(f"{where}: its files do not make one checkpoint", key=attempt)
    files = [[row.name, row.num_bytes, row.data_offset, row.digest] for row in rows]
    values = [[path_to_json(path), v] for header in headers for path, v in header.shared.items()]
    manifest = Manifest.from_json({**spare, "files": files, "values": values}, where)
    if (manifest.attempt, {manifest.step}) != (attempt, steps):
        raise CorruptCheckpointError(f"{where}: its files do not make one checkpoint", key=attempt)
    return manifest


def _read_header(store: Store, name: str, num_bytes: int) -> tuple[ShardHeader, FileRow]:
    where = f"{store.url}/{name}"
    length = bytearray(8)
    if num_bytes < len(length):
        raise CorruptCheckpointError(f"{where}: {num_bytes} bytes, no header", key=name)
    store.read_into(name, 0, memoryview(length))
    data_offset = 8 + int.from_bytes(length, "little")
    if not 8 < data_offset <= min(num_bytes, 8 + MAX_HEADER_BYTES):
        raise CorruptCheckpointError(f"{where}: the header was not written", key=name)
    region = bytearray(data_offset)
    store.read_into(name, 0, memoryview(region))
    header = ShardHeader.from_bytes(bytes(region), where)
    expected = data_offset + header.layout.data_bytes
    if num_bytes != expected:
        raise CorruptCheckpointError(
            f"{where}: {num_bytes} bytes, {expected} expected; it is not whole", key=name
        )
    row = FileRow(
        name=name, num_bytes=num_bytes, data_offset=data_offset, digest=digest(bytes(region))
    )
    return header, row
