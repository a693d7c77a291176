"""A rank's shard on its way: the image with its header, the copy, the job for the writer, the receipt."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_ckpt.commit.receipt import Attempt, ShardReceipt, seal
from fsdp_ckpt.dcp.contents import Contents
from fsdp_ckpt.manifest.schema import FileRow, Manifest, shard_name
from fsdp_ckpt.manifest.shard import DIGEST_HEX, ShardHeader
from fsdp_ckpt.manifest.tree import Path
from fsdp_ckpt.manifest.typed_json import Json
from fsdp_ckpt.plan.image import BLOCK_BYTES, Entry, ImageLayout
from fsdp_ckpt.snapshot.buffer import HostBuffer, ImagePool
from fsdp_ckpt.snapshot.head_start import HeadStart
from fsdp_ckpt.snapshot.host_copy import HostCopy
from fsdp_ckpt.snapshot.image import Filled, SideStreams, fill_image
from fsdp_ckpt.writer.handover import FileName
from fsdp_ckpt.writer.job import NO_DIGEST, WriteJob

__all__ = ["ShardImage", "write_job"]


def write_job(
    data_offset: int, layout: ImageLayout, num_threads: int | None, address: Mapping[str, Any]
) -> WriteJob:
    """Return what to ask of a writer, whatever the header and the file's name will be.

    Args:
        data_offset: Start of the data, in bytes.
        layout: Of the data.
        num_threads: Threads that write; ``None`` as many as suit the store.
        address: Url and storage options, where another process writes.
    """
    return WriteJob(
        num_bytes=data_offset + layout.data_bytes,
        data_offset=data_offset,
        block_bytes=BLOCK_BYTES,
        num_threads=num_threads,
        **address,
    )


@dataclass(frozen=True, kw_only=True)
class ShardImage:
    """An image whose header is in place, but for the digests; its data is still to be copied.

    Args:
        buffer: The memory.
        contents: What is to be copied; refers to live tensors.
        name: Of the file, within the step's folder.
        num_bytes: Size of the file.
        data_offset: Start of the data, in bytes.
        digests_at: Where the digests go, in bytes.
        host_copy: Copies what is in host memory.
        values: The global values that this rank answers for, as they are now.
        inline: Content of the tensors that the manifest holds too, as they are now.
        num_copied: Entries that are in place, the first ones.
    """

    buffer: HostBuffer
    contents: Contents
    name: str
    num_bytes: int
    data_offset: int
    digests_at: int
    host_copy: HostCopy
    values: Mapping[Path, Json]
    inline: Mapping[str, bytes]
    num_copied: int = 0

    @classmethod
    def begin(
        cls,
        contents: Contents,
        attempt: Attempt,
        rank: int,
        pool: ImagePool,
        *,
        manifest: Manifest | None = None,
        head_start: HeadStart | None = None,
        digesting: bool = False,
    ) -> ShardImage:
        """Take a buffer and put the header into it; copy everything that is not a tensor.

        Args:
            contents: What this rank writes.
            attempt: Of this save.
            rank: This rank.
            pool: Where the buffer comes from; the caller gives it back.
            manifest: On rank 0, the manifest so far, kept in the shard as a spare.
            head_start: Entries that are copied already; its buffer is the image's where it fits, else
                given up.
            digesting: Whether training stands still while the image is filled, so that what is copied can be
                digested on the way.

        Raises:
            CheckpointError: The header would be larger than safetensors allows.
        """
        # Stands in the header where the digests will, and nowhere else.
        blank = secrets.token_hex(DIGEST_HEX // 2)
        header = ShardHeader(
            step=attempt.step,
            attempt=attempt.id,
            rank=rank,
            world_size=attempt.world_size,
            layout=contents.layout,
            paths=contents.paths,
            own=contents.own,
            values=contents.own_values,
            shared=contents.global_values,
            digests=(blank,) * contents.layout.num_blocks,
            manifest=None if manifest is None else seal(manifest, attempt).to_json(),
        ).to_bytes()
        num_bytes = len(header) + contents.layout.data_bytes
        inline = contents.inline()
        if head_start is not None and head_start.fits(len(header), contents.layout):
            buffer, num_copied = head_start.buffer, head_start.num_entries
            host_copy = head_start.host_copy
        else:
            if head_start is not None:
                head_start.give_up()
            buffer, num_copied = pool.acquire(num_bytes), 0
            host_copy = HostCopy(contents.layout.data_bytes, digesting=digesting)
        buffer.memory[: len(header)] = header
        return cls(
            buffer=buffer,
            contents=contents,
            name=shard_name(attempt.id, rank, attempt.world_size),
            num_bytes=num_bytes,
            data_offset=len(header),
            digests_at=max(header.find(blank.encode()), 0),
            host_copy=host_copy,
            values=contents.global_values,
            inline=inline,
            num_copied=num_copied,
        )

    @property
    def view(self) -> memoryview:
        """The file's bytes."""
        return memoryview(self.buffer.memory)[: self.num_bytes]

    def fill(
        self,
        filled: Filled | None = None,
        only: Callable[[Entry], bool] | None = None,
        streams: SideStreams | None = None,
    ) -> None:
        """Copy the tensors that are not in place, or ``only`` some of them.

        See :func:`~fsdp_ckpt.snapshot.image.fill_image`. ``filled`` is told of the end too, once and last;
        without it something is still to come.
        """
        layout = self.contents.layout
        rest = layout.entries[self.num_copied :]
        entries = rest if only is None else [e for e in rest if only(e)]
        fill_image(
            self.buffer,
            self.data_offset,
            layout,
            self.contents.resolve,
            entries=entries,
            filled=filled,
            host_copy=self.host_copy,
            streams=streams,
        )
        if filled is not None:
            # Once it is told, the header is the writer's, who looks for these and puts its own beside them.
            self._put_digests()
            filled(self.num_bytes)

    def _put_digests(self) -> None:
        """Put the digests that the copy has taken into the header; the writer takes the others."""
        taken = self.host_copy.digests
        digests = (taken.get(i, NO_DIGEST) for i in range(self.contents.layout.num_blocks))
        hole = "".join(digests).encode()
        self.buffer.memory[self.digests_at : self.digests_at + len(hole)] = hole

    def file_name(self, folder: str = "") -> FileName:
        """Return what to tell a writer of the file, in a folder of the store."""
        return FileName(f"{folder}/{self.name}" if folder else self.name, self.digests_at)

    def receipt(self, header_digest: str) -> ShardReceipt:
        """Return what to tell the coordinator once the file is durable."""
        row = FileRow(
            name=self.name,
            num_bytes=self.num_bytes,
            data_offset=self.data_offset,
            digest=header_digest,
        )
        return ShardReceipt(file=row, values=self.values, inline=self.inline)
