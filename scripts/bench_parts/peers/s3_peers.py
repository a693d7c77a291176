"""Saves to a bucket: ours, DCP's through fsspec, s3torchconnector's, and what two clients move at most.

Every peer takes the server from s3fs' options: ``key``, ``secret``, ``endpoint_url``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import obstore
import s3fs
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from obstore.store import S3Store
from s3torchconnector import S3ClientConfig
from s3torchconnector._s3client import S3Client
from s3torchconnector.dcp import S3StorageReader, S3StorageWriter
from s3torchconnector.dcp.s3_file_system import S3FileSystem
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from bench_parts.peers.peer import Wait, done
from bench_parts.peers.state import PeerState
from fsdp_ckpt import CheckpointManager, SaveOptions

__all__ = ["DcpOnS3", "ObstoreClient", "OursOnS3", "S3TorchConnector", "S3fsClient"]

MIB = 2**20
REGION = "us-east-1"


class OursOnS3:
    """A synchronous manager."""

    in_background = False

    def __init__(self, state: PeerState, place: str, options: dict[str, Any]) -> None:
        self._progress = state.training.state.progress
        self._manager = CheckpointManager(
            place,
            state.training.state,
            options=SaveOptions(mode="sync"),
            storage_options=options,
        )

    def start(self) -> Wait:
        """Save."""
        self._progress.advance(samples=1)
        self._manager.save().wait()
        return done

    def load(self) -> None:
        """Restore."""
        self._manager.restore()

    def close(self) -> None:
        """End the manager."""
        self._manager.close()


class DcpOnS3:
    """``FsspecWriter`` and ``FsspecReader``."""

    in_background = False

    def __init__(self, state: PeerState, place: str, options: dict[str, Any]) -> None:
        self._state_dict = state.training.state_dict()
        self._place, self._options = place, options

    def start(self) -> Wait:
        """Save."""
        writer = FsspecWriter(self._place, **self._options)
        client = writer.fs.fs

        async def delete_each(paths: list[str]) -> list[str]:
            for path in paths:
                await client._rm_file(path)
            return paths

        # juicefs refuses the bulk delete of this client, and DCP's last rename is a copy and a delete.
        client._bulk_delete = delete_each
        dcp.save(self._state_dict, storage_writer=writer)
        return done

    def load(self) -> None:
        """Load."""
        reader = FsspecReader(self._place, **self._options)
        dcp.load(self._state_dict, storage_reader=reader)

    def close(self) -> None:
        """Nothing is left."""


class S3TorchConnector:
    """Its DCP classes. They take no endpoint, so theirs is replaced by one of the same client that has it."""

    in_background = False

    def __init__(self, state: PeerState, place: str, options: dict[str, Any]) -> None:
        self._state_dict = state.training.state_dict()
        self._place = place
        os.environ |= {
            "AWS_ACCESS_KEY_ID": options["key"],
            "AWS_SECRET_ACCESS_KEY": options["secret"],
        }
        config = S3ClientConfig(force_path_style=True)
        self._client = S3Client(REGION, endpoint=options["endpoint_url"], s3client_config=config)

    def start(self) -> Wait:
        """Save."""
        writer = S3StorageWriter(REGION, self._place)
        writer.fs = S3FileSystem(REGION, s3_client=self._client)
        dcp.save(self._state_dict, storage_writer=writer)
        return done

    def load(self) -> None:
        """Load, by the reader that it has for DCP."""
        reader = S3StorageReader(REGION, self._place)
        reader.fs._client = self._client
        dcp.load(self._state_dict, storage_reader=reader)

    def close(self) -> None:
        """Nothing is left."""


class _Client:
    """An object per rank, put in parts and got in ranges, and copied into the live tensors."""

    in_background = False

    def __init__(
        self,
        state: PeerState,
        place: str,
        options: dict[str, Any],
        *,
        part_bytes: int,
        num_requests: int,
    ) -> None:
        self._tensors = state.tensors
        self._options = options
        self._bucket, _, prefix = place.removeprefix("s3://").partition("/")
        self._key = f"{prefix}/{dist.get_rank()}"
        self._part_bytes, self._num_requests = part_bytes, num_requests
        self._bytes = b"".join(tensor.numpy().tobytes() for tensor in state.tensors)
        starts = list(range(0, len(self._bytes), part_bytes))
        self._ranges = list(zip(starts, [*starts[1:], len(self._bytes)], strict=True))

    def start(self) -> Wait:
        """Put."""
        self._put()
        return done

    def load(self) -> None:
        """Get."""
        found = torch.frombuffer(bytearray().join(self._get()), dtype=torch.uint8)
        at = 0
        for tensor in self._tensors:
            tensor.view(-1).view(torch.uint8).copy_(found[at : at + tensor.nbytes])
            at += tensor.nbytes

    def close(self) -> None:
        """Nothing is left."""

    def _put(self) -> None:
        raise NotImplementedError

    def _get(self) -> Sequence[Any]:
        raise NotImplementedError


class S3fsClient(_Client):
    """s3fs."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._fs = s3fs.S3FileSystem(**self._options, use_listings_cache=False)
        self._url = f"{self._bucket}/{self._key}"

    def _put(self) -> None:
        self._fs.pipe_file(
            self._url, self._bytes, chunksize=self._part_bytes, max_concurrency=self._num_requests
        )

    def _get(self) -> Sequence[Any]:
        starts, stops = map(list, zip(*self._ranges, strict=True))
        urls = [self._url] * len(starts)
        found: list[bytes] = self._fs.cat_ranges(
            urls, starts, stops, batch_size=self._num_requests, on_error="raise"
        )
        return found


class ObstoreClient(_Client):
    """obstore: the object_store crate of Rust. A thread per request in flight waits for it."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._store = S3Store(
            self._bucket,
            endpoint=self._options["endpoint_url"],
            access_key_id=self._options["key"],
            secret_access_key=self._options["secret"],
            region=REGION,
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
        )
        self._threads = ThreadPoolExecutor(self._num_requests)

    def _put(self) -> None:
        obstore.put(
            self._store,
            self._key,
            self._bytes,
            chunk_size=self._part_bytes,
            max_concurrency=self._num_requests,
        )

    def _get(self) -> Sequence[Any]:
        def get(ends: tuple[int, int]) -> Any:
            return obstore.get_range(self._store, self._key, start=ends[0], end=ends[1])

        return list(self._threads.map(get, self._ranges))

    def close(self) -> None:
        """End its threads."""
        self._threads.shutdown()
