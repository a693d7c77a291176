"""Where a checkpoint holds what a rank of today asks for: the global content, or the rank's own.

A rank's own content is what it saved for itself. It gets that back where the world size is the same, and on
another one only under names that say so (``keep_own``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from fsdp_ckpt.commit.checkpoint import Checkpoint, Piece
from fsdp_ckpt.errors import CorruptCheckpointError, MismatchError
from fsdp_ckpt.manifest.shard import ShardHeader
from fsdp_ckpt.manifest.tree import path_name
from fsdp_ckpt.manifest.typed_json import Json
from fsdp_ckpt.plan.box import Box

__all__ = ["PieceFinder"]


class PieceFinder:
    """Finds for one rank.

    Args:
        checkpoint: Open.
        rank: This rank.
        world_size: Number of ranks today.
        keep_own: Names whose rank-local content a rank gets back on another world size too, where it existed
            at save time.
    """

    def __init__(
        self, checkpoint: Checkpoint, rank: int, world_size: int, keep_own: Callable[[str], bool]
    ) -> None:
        self.checkpoint = checkpoint
        self._rank = rank
        self._world_size = world_size
        self._keep_own = keep_own

    def has_own(self, name: str) -> bool:
        """Whether what this rank saved for itself under ``name`` is still its own today."""
        world_size = self.checkpoint.manifest.world_size
        return world_size == self._world_size or (self._rank < world_size and self._keep_own(name))

    @cached_property
    def own_values(self) -> dict[str, Json]:
        """Name → typed JSON of what this rank saved for itself."""
        header = self._own_header
        values = {} if header is None else {path_name(p): v for p, v in header.values.items()}
        return {name: value for name, value in values.items() if self.has_own(name)}

    @cached_property
    def own_tensors(self) -> frozenset[str]:
        """Names of the tensors that this rank saved for itself."""
        own = frozenset() if self._own_header is None else self._own_header.own
        return frozenset(name for name in own if self.has_own(name))

    @property
    def reads_own_header(self) -> bool:
        """Whether this rank looks into the file that it wrote, whatever it reads there."""
        manifest = self.checkpoint.manifest
        return bool(manifest.own_paths or manifest.varying) and self._rank < manifest.world_size

    @property
    def _own_header(self) -> ShardHeader | None:
        """The header of the file that this rank wrote; ``None`` where ranks have nothing of their own."""
        return self.checkpoint.header(self._rank) if self.reads_own_header else None

    @cached_property
    def _varying(self) -> frozenset[str]:
        return frozenset(path_name(p) for p in self.checkpoint.manifest.varying)

    def region_piece(self, name: str, region: Box) -> Piece:
        """Return where a box of a tensor lies that comes from one file."""
        checkpoint = self.checkpoint
        if name in self._varying and self.has_own(name):
            own = checkpoint.own_piece(self._rank, name)
            if own is not None:
                return Piece(own.rank, own.entry, region)
        (piece,) = checkpoint.pieces(checkpoint.rows[name], region)
        return piece

    def whole_piece(self, name: str) -> Piece | None:
        """Return the tensor that is this rank's own under ``name``, or the global one from which ranks vary.

        ``None`` where the global one has no elements.
        """
        checkpoint, manifest = self.checkpoint, self.checkpoint.manifest
        piece = checkpoint.own_piece(self._rank, name) if self.has_own(name) else None
        if piece is not None:
            return piece
        if name in checkpoint.rows:
            row = checkpoint.rows[name]
            return next(iter(checkpoint.pieces(row, Box.whole(row.shape))), None)
        if self.has_own(name):
            raise CorruptCheckpointError(
                f"step {manifest.step}: the shard of rank {self._rank}, {manifest.files[self._rank].name}, "
                f"lacks the rank's own {name}",
                step=manifest.step,
                rank=self._rank,
                key=name,
            )
        raise MismatchError(
            f"{name}: saved by each of {manifest.world_size} ranks for itself, {self._world_size} ranks "
            "cannot share it out; leave it out of the state to load",
            step=manifest.step,
            key=name,
        )
