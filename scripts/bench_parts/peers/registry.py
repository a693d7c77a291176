"""The peers by name. What a peer needs is imported when it is made: it may not be installed, or not load."""

from __future__ import annotations

from typing import Any

from bench_parts.peers.peer import Peer
from bench_parts.peers.state import PeerState

__all__ = [
    "BACKGROUND",
    "NAMES",
    "OURS",
    "OURS_BACKGROUND",
    "S3_NAMES",
    "make_peer",
    "make_s3_peer",
]

OURS, OURS_BACKGROUND = "ours", "ours async"
# Those that are compared with our save in the background; the others with the synchronous one.
BACKGROUND = (OURS_BACKGROUND, "dcp thread", "dcp process", "torch_checkpointing async")
NAMES = (
    OURS,
    "dcp",
    "dcp fsspec",
    "dcp safetensors",
    "torch_checkpointing",
    "bytecheckpoint",
    *BACKGROUND,
)
# Part size in MiB, and requests of one rank in flight.
TUNINGS = {
    f"{part_mib} MiB x {num}": (part_mib, num) for part_mib, num in ((16, 4), (8, 8), (32, 2))
}
CLIENTS = [f"{client} {tuning}" for client in ("s3fs", "obstore") for tuning in TUNINGS]
S3_NAMES = (OURS, "dcp fsspec", "s3torchconnector", *CLIENTS)


def make_peer(name: str, state: PeerState, place: str) -> Peer:
    """Make a peer; on every rank.

    Args:
        name: One of ``NAMES``.
        state: What it saves and loads.
        place: A folder for it alone.
    """
    kind, _, way = name.partition(" ")
    if kind == OURS:
        from bench_parts.peers.our_peers import Ours

        return Ours(state, place, mode="async" if way else "sync")
    if kind == "torch_checkpointing":
        from bench_parts.peers.meta_peers import TorchCheckpointing

        return TorchCheckpointing(state, place, in_background=bool(way))
    if kind == "bytecheckpoint":
        from bench_parts.peers.bytecheckpoint_peers import ByteCheckpoint

        return ByteCheckpoint(state, place)
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    from bench_parts.peers import dcp_peers

    if way in ("thread", "process"):
        return dcp_peers.DcpInBackground(state, place, kind=AsyncCheckpointerType(way))
    by_way = {
        "": dcp_peers.DcpFiles,
        "fsspec": dcp_peers.DcpFsspec,
        "safetensors": dcp_peers.DcpSafetensors,
    }
    return by_way[way](state, place)


def make_s3_peer(name: str, state: PeerState, place: str, *, options: dict[str, Any]) -> Peer:
    """Make a peer that saves to a bucket; on every rank.

    Args:
        name: One of ``S3_NAMES``.
        state: What it saves and loads.
        place: A URL for it alone.
        options: What s3fs needs to reach the server.
    """
    from bench_parts.peers import s3_peers

    kind, _, tuning = name.partition(" ")
    if tuning in TUNINGS:
        part_mib, num_requests = TUNINGS[tuning]
        client = s3_peers.S3fsClient if kind == "s3fs" else s3_peers.ObstoreClient
        return client(
            state, place, options, part_bytes=part_mib * s3_peers.MIB, num_requests=num_requests
        )
    by_kind = {
        OURS: s3_peers.OursOnS3,
        "dcp": s3_peers.DcpOnS3,
        "s3torchconnector": s3_peers.S3TorchConnector,
    }
    return by_kind[kind](state, place, options)
