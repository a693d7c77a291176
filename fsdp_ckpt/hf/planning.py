"""What a consolidation will write, before it writes anything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from fsdp_ckpt.commit.checkpoint import Checkpoint
from fsdp_ckpt.hf.layout import OutputFile, index_of, lay_out_files
from fsdp_ckpt.hf.selection import Selected, Selection, select_tensors
from fsdp_ckpt.storage.shard_io import digest

__all__ = ["Plan", "make_plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What will be written.

    Args:
        checkpoint: Where from.
        selected: Tensors, and where they stand in the checkpoint.
        files: Of the output, in order.
        stem: With which their names begin.
        dtype: What floating-point tensors become, where not what they are.
    """

    checkpoint: Checkpoint
    selected: Selected
    files: tuple[OutputFile, ...]
    stem: str
    dtype: str | None

    @property
    def sizes(self) -> Mapping[str, int]:
        """Name → bytes of the files."""
        return {file.name: file.num_bytes for file in self.files}

    @property
    def index(self) -> bytes | None:
        """The index; ``None`` for a single file."""
        return index_of(self.files)

    @property
    def fingerprint(self) -> str:
        """Digest of all that decides on the bytes of the files: runs of the same one write the same."""
        manifest = self.checkpoint.manifest
        document = {
            "attempt": manifest.attempt,
            # They vouch for the headers, and these for the data.
            "headers": [file.digest for file in manifest.files],
            "files": [[file.name, digest(file.header)] for file in self.files],
            "sources": [[name, row.name] for name, row in self.selected.rows.items()],
        }
        return digest(json.dumps(document, separators=(",", ":")).encode())


def make_plan(checkpoint: Checkpoint, selection: Selection, max_shard_bytes: int) -> Plan:
    """Plan the output; reads nothing.

    Raises:
        NotFoundError: The checkpoint holds none of what is asked for.
        MismatchError: Names meet, or a part of the model is each rank's own.
        UnencodableStateError: A name or dtype has no place in a safetensors file.
    """
    selected = select_tensors(checkpoint, selection)
    return Plan(
        checkpoint=checkpoint,
        selected=selected,
        files=lay_out_files(selected.tensors, max_shard_bytes, selection.stem),
        stem=selection.stem,
        dtype=selection.dtype,
    )
