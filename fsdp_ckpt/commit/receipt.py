"""What ranks and coordinator tell each other about one try to save a step.

coordinator: Attempt ──> ranks write their files ──> ShardReceipt ──> seal: the manifest of all files
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_ckpt.manifest.schema import FileRow, Manifest
from fsdp_ckpt.manifest.tree import Path, path_from_json, path_to_json
from fsdp_ckpt.manifest.typed_json import Json
from fsdp_ckpt.version import __version__

__all__ = ["Attempt", "ShardReceipt", "seal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try to save a step; its id is the coordinator's choice.

    Args:
        id: Unique; names the folder of the shard files.
        step: Training step.
        world_size: Number of ranks.
        generation: Number of rollbacks so far.
    """

    id: str
    step: int
    world_size: int
    generation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReceipt:
    """Says that a rank's shard file is durable.

    Args:
        file: Its row in the manifest.
        values: The global values that this rank answers for, typed JSON by path.
        inline: Content of the tensors that the manifest holds too, by name; of rank 0.
    """

    file: FileRow
    values: Mapping[Path, Json]
    inline: Mapping[str, bytes]

    def to_json(self) -> Json:
        """Return plain data."""
        row = [self.file.name, self.file.num_bytes, self.file.data_offset, self.file.digest]
        return {
            "file": row,
            "values": [[path_to_json(p), v] for p, v in self.values.items()],
            "inline": {name: data.hex() for name, data in self.inline.items()},
        }

    @classmethod
    def from_json(cls, encoded: Mapping[str, Any]) -> ShardReceipt:
        """Rebuild what :meth:`to_json` described."""
        name, num_bytes, data_offset, digest = encoded["file"]
        row = FileRow(name=name, num_bytes=num_bytes, data_offset=data_offset, digest=digest)
        return cls(
            file=row,
            values={path_from_json(p): v for p, v in encoded["values"]},
            inline={name: bytes.fromhex(data) for name, data in encoded["inline"].items()},
        )


def seal(manifest: Manifest, attempt: Attempt, receipts: Sequence[ShardReceipt] = ()) -> Manifest:
    """Complete a draft with what the attempt and its receipts say; without receipts, as a spare."""
    values = dict(manifest.values)
    inline = dict(manifest.inline)
    for receipt in receipts:
        values.update(receipt.values)
        inline.update(receipt.inline)
    return dataclasses.replace(
        manifest,
        step=attempt.step,
        attempt=attempt.id,
        generation=attempt.generation,
        files=tuple(receipt.file for receipt in receipts),
        values=values,
        inline=inline,
        library=__version__,
    )
