"""The header of a shard file: plain safetensors, plus what a manifest could be rebuilt from.

    8 bytes     length of the JSON, little endian
    JSON        tensor entries, and __metadata__["fsdp_ckpt"] (typed JSON in a string): step, attempt, rank,
                what each entry is a chunk of, this rank's own values, digests of the data's blocks
    spaces      up to a multiple of 4096, where the data starts

The digests are fixed-width, so the header's length is known before the data's digests are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fsdp_ckpt.errors import CheckpointError, CorruptCheckpointError
from fsdp_ckpt.manifest.fields import count, counts, shown, text
from fsdp_ckpt.manifest.last_result import LastResult
from fsdp_ckpt.manifest.strict_json import brief, parse_json, refuse_depth
from fsdp_ckpt.manifest.tree import (
    Path,
    path_from_json,
    path_name,
    path_to_json,
    values_from_json,
)
from fsdp_ckpt.manifest.typed_json import MAX_JSON_DEPTH, Json
from fsdp_ckpt.plan.box import Box
from fsdp_ckpt.plan.coverage import MAX_DIMS
from fsdp_ckpt.plan.dtypes import stored_form
from fsdp_ckpt.plan.image import BLOCK_BYTES, PAGE_BYTES, Entry, ImageLayout

__all__ = ["DIGEST_ALGORITHM", "DIGEST_HEX", "MAX_HEADER_BYTES", "ShardHeader"]

DIGEST_ALGORITHM = "xxh3_64"
DIGEST_HEX = 16
MAX_HEADER_BYTES = 100_000_000  # the limit that safetensors readers enforce


@dataclass(frozen=True, kw_only=True)
class ShardHeader:
    """All that a shard file says about itself.

    Args:
        step: Training step.
        attempt: Id of the save.
        rank: Rank that wrote it.
        world_size: Number of ranks of the save.
        layout: Entries and where they lie.
        paths: Entry name → where the tensor stands in the state.
        own: Names of entries that are this rank's own, not chunks of a global tensor.
        values: This rank's own values, typed JSON by path.
        shared: The global values that this rank answers for, typed JSON by path.
        digests: One per block of the data, 16 hex digits each.
        manifest: In rank 0's file, the manifest without its file rows and values.
    """

    step: int
    attempt: str
    rank: int
    world_size: int
    layout: ImageLayout
    paths: Mapping[str, Path]
    own: frozenset[str] = frozenset()
    values: Mapping[Path, Json] = field(default_factory=dict)
    shared: Mapping[Path, Json] = field(default_factory=dict)
    digests: tuple[str, ...] = ()
    manifest: Json = None

    def to_bytes(self) -> bytes:
        """Return the header region; its length does not depend on the digests' values."""
        digests = self.digests or ("0" * DIGEST_HEX,) * self.layout.num_blocks
        described, stored = _entries_to_json(self.layout, self.paths, self.own)
        first = {
            "version": 1,
            "step": self.step,
            "attempt": self.attempt,
            "rank": self.rank,
            "world_size": self.world_size,
        }
        rest = {
            "values": [[path_to_json(path), value] for path, value in self.values.items()],
            "shared": [[path_to_json(path), value] for path, value in self.shared.items()],
            "digests": {
                "algorithm": DIGEST_ALGORITHM,
                "block_bytes": BLOCK_BYTES,
                "blocks": "".join(digests),
            },
        }
        if self.manifest is not None:
            rest["manifest"] = self.manifest
        about = f'{_dumps(first)[:-1]},"entries":{described},{_dumps(rest)[1:]}'
        metadata = _dumps({"__metadata__": {"format": "pt", "fsdp_ckpt": about}})
        encoded = (f"{metadata[:-1]},{stored[1:]}" if len(stored) > 2 else metadata).encode()
        padding = -(8 + len(encoded)) % PAGE_BYTES
        size = len(encoded) + padding
        if size > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"rank {self.rank}: the shard's header would take {size} bytes, more than the "
                f"{MAX_HEADER_BYTES} that safetensors allows; save large values as tensors",
                rank=self.rank,
            )
        return size.to_bytes(8, "little") + encoded + b" " * padding

    @classmethod
    def from_bytes(cls, region: bytes, where: str) -> ShardHeader:
        """Parse a header region (length field, JSON, padding).

        Raises:
            CorruptCheckpointError: Not a shard file of fsdp_ckpt, or inconsistent.
        """
        try:
            if int.from_bytes(region[:8], "little") != len(region) - 8:
                raise CorruptCheckpointError("the length field does not match")
            header = parse_json(region[8:])
            about = parse_json(header["__metadata__"]["fsdp_ckpt"])
            return cls._from_json(header, about)
        except CheckpointError as e:
            raise CorruptCheckpointError(
                f"{where}: malformed shard header ({brief(e)})", key=where
            ) from e
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError) as e:
            raise CorruptCheckpointError(
                f"{where}: malformed shard header ({type(e).__name__}: {brief(e)})", key=where
            ) from e

    @classmethod
    def _from_json(cls, header: Mapping[str, Any], about: Mapping[str, Any]) -> ShardHeader:
        entries: list[Entry] = []
        paths: dict[str, Path] = {}
        own: set[str] = set()
        if len(header) != len(about["entries"]) + 1:
            raise CorruptCheckpointError(
                f"{len(header) - 1} entries, {len(about['entries'])} are described"
            )
        for key, (encoded, dtype, shape, offsets, *flags) in about["entries"].items():
            path = path_from_json(encoded)
            start, stop = counts(header[key]["data_offsets"])
            entry = Entry(
                key=key,
                name=path_name(path),
                dtype=text(dtype),
                shape=counts(shape),
                box=Box(counts(offsets), _sizes(header[key], dtype)),
                byte_offset=start,
            )
            _check_box(entry)
            if stop - start != entry.num_bytes:
                raise CorruptCheckpointError(
                    f"{key}: {stop - start} bytes, {entry.num_bytes} expected"
                )
            if paths.setdefault(entry.name, path) != path:
                raise CorruptCheckpointError(f"{key}: two tensors have its name")
            entries.append(entry)
            if "own" in flags:
                own.add(entry.name)
        data_bytes = 0
        for entry in sorted(entries, key=lambda e: (e.byte_offset, e.num_bytes)):
            if entry.byte_offset != data_bytes:
                raise CorruptCheckpointError(
                    f"{entry.key}: overlaps another entry, or leaves a gap"
                )
            data_bytes += entry.num_bytes
        if len({(entry.name, entry.box.offsets) for entry in entries}) != len(entries):
            raise CorruptCheckpointError("a chunk stands twice in the file")
        layout = ImageLayout(tuple(entries), data_bytes)
        manifest = about.get("manifest")
        refuse_depth([manifest], MAX_JSON_DEPTH)
        return cls(
            step=count(about["step"]),
            attempt=text(about["attempt"]),
            rank=count(about["rank"]),
            world_size=count(about["world_size"]),
            layout=layout,
            paths=paths,
            own=frozenset(own),
            values=values_from_json(about["values"]),
            shared=values_from_json(about["shared"]),
            digests=_digests_from_json(about["digests"], layout.num_blocks),
            manifest=manifest,
        )


def _check_box(entry: Entry) -> None:
    box, shape = entry.box, entry.shape
    if not len(box.offsets) == len(box.sizes) == len(shape) <= MAX_DIMS:
        raise CorruptCheckpointError(f"{entry.key}: a chunk of other dims than its tensor")
    if any(a + n > length for a, n, length in zip(box.offsets, box.sizes, shape, strict=True)):
        raise CorruptCheckpointError(f"{entry.key}: a chunk outside of its tensor")


@LastResult
def _entries_to_json(
    layout: ImageLayout, paths: Mapping[str, Path], own: frozenset[str]
) -> tuple[str, str]:
    """Return what entries are chunks of, and their descriptions as safetensors has them; both encoded."""
    described: dict[str, Json] = {}
    stored: dict[str, Json] = {}
    for entry in layout.entries:
        row = [path_to_json(paths[entry.name]), entry.dtype, list(entry.shape)]
        row.append(list(entry.box.offsets))
        described[entry.key] = [*row, "own"] if entry.name in own else row
        dtype, shape = stored_form(entry.dtype, entry.box.sizes)
        span = [entry.byte_offset, entry.byte_offset + entry.num_bytes]
        stored[entry.key] = {"dtype": dtype, "shape": list(shape), "data_offsets": span}
    return _dumps(described), _dumps(stored)


def _sizes(stored: Mapping[str, Any], dtype: str) -> tuple[int, ...]:
    """Return the sizes of a chunk from how it stands in the safetensors header."""
    shape = counts(stored["shape"])
    sizes = shape if stored_form(dtype, ()) == (dtype, ()) else shape[:-1]
    if stored_form(dtype, sizes) != (stored["dtype"], shape):
        raise CorruptCheckpointError(f"{shown(stored['dtype'])} for a chunk of {dtype}")
    return sizes


def _digests_from_json(encoded: Mapping[str, Any], num_blocks: int) -> tuple[str, ...]:
    if encoded["algorithm"] != DIGEST_ALGORITHM or encoded["block_bytes"] != BLOCK_BYTES:
        raise CorruptCheckpointError(
            f"digests by {shown(encoded['algorithm'])} of {shown(encoded['block_bytes'])} bytes"
        )
    blocks = text(encoded["blocks"])
    if len(blocks) != num_blocks * DIGEST_HEX:
        raise CorruptCheckpointError(f"{len(blocks) // DIGEST_HEX} digests for {num_blocks} blocks")
    return tuple(blocks[i : i + DIGEST_HEX] for i in range(0, len(blocks), DIGEST_HEX))


def _dumps(value: Json) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
