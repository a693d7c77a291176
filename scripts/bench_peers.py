"""Time saves and loads beside other libraries: `python scripts/bench_peers.py [--quick] [--json]`.

    ours                  CheckpointManager: sync, and async with its writer process; loads are verified
    dcp                   torch.distributed.checkpoint: FileSystemWriter, FsspecWriter, async_save by thread
                          and by process, HuggingFaceStorageWriter (safetensors)
    torch_checkpointing   its manager, sync and async
    bytecheckpoint        save and load for FSDP2
    raw                   a copy into touched memory, a direct write with fsync, a direct read
    --s3                  ours, dcp and s3torchconnector on an S3 server on loopback, and what the clients
                          s3fs and obstore move at most

    stall      until training may go on        saved    until it says that it is saved
    on disk    until all of it is fsynced      load     from a cold page cache into the live tensors

Needs an environment of its own: `make bench-full` makes it. docs/peers.md says how all is measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch.distributed as dist
from bench_parts.clock import combine
from bench_parts.limits import PlainBuffer
from bench_parts.peers.grounds import Bucket, Disk
from bench_parts.peers.machine import describe_machine, find_versions
from bench_parts.peers.registry import (
    BACKGROUND,
    NAMES,
    OURS,
    OURS_BACKGROUND,
    S3_NAMES,
    make_peer,
    make_s3_peer,
)
from bench_parts.peers.rounds import Found, PeerRounds
from bench_parts.peers.state import PeerState
from bench_parts.peers.table import describe, draw

from fsdp_ckpt.testing import over_tcp, run_ranks

NUM_RANKS = 4
NEEDED = ("torch_checkpointing", "bytecheckpoint", "s3torchconnector", "obstore", "s3fs")
RAW = "raw"


class Limits:
    """What the machine can do: the plainest way to move this rank's bytes.

    Args:
        rounds: Whose state, clock and disk it uses.
    """

    def __init__(self, rounds: PeerRounds) -> None:
        self._rounds = rounds
        self._buffer = PlainBuffer(rounds.state.num_bytes)

    def run(self) -> None:
        """Copy, write and read."""
        clock, ground = self._rounds.clock, self._rounds.ground
        ground.prepare(RAW)
        path = Path(ground.place(RAW)) / str(dist.get_rank())
        start = clock.start()
        self._buffer.copy(self._rounds.state.tensors)
        clock.stop(f"{RAW}: stall", start)
        start = clock.start()
        self._buffer.write(path)
        clock.stop(f"{RAW}: saved", start)
        clock.stop(f"{RAW}: on disk", start)
        ground.forget(RAW)
        start = clock.start()
        self._buffer.read([(path, 0, path.stat().st_size)])
        clock.stop(f"{RAW}: load", start)


def measure_disk(root: str, state_bytes: int, names: Sequence[str], num_rounds: int) -> Found:
    """Run the peers in folders, on this rank."""
    rounds = PeerRounds(PeerState(state_bytes), Disk(Path(root)), make_peer)
    return rounds.run(names, num_rounds, [Limits(rounds).run])


def measure_s3(
    url: str, options: dict[str, Any], state_bytes: int, names: Sequence[str], num_rounds: int
) -> Found:
    """Run the peers in a bucket, on this rank."""
    bucket = Bucket(url, options)
    rounds = PeerRounds(PeerState(state_bytes), bucket, partial(make_s3_peer, options=options))
    return rounds.run(names, num_rounds)


def run_on_disk(args: argparse.Namespace, num_rounds: int) -> dict[str, dict[str, Any]]:
    """Measure in a folder of its own; return what was found, by peer."""
    names = [name for name in NAMES if not args.only or name.split()[0] in args.only]
    state_bytes = int((args.gib or (0.5 if args.quick else 2)) * 2**30)
    with tempfile.TemporaryDirectory(prefix="bench-peers-", dir=args.folder) as root:
        ranks = run_ranks(
            measure_disk,
            NUM_RANKS,
            root,
            state_bytes,
            names,
            num_rounds,
            timeout_s=args.timeout,
            env=over_tcp(),
        ).values
        return _describe(ranks, (OURS, OURS_BACKGROUND), root)


def run_on_s3(args: argparse.Namespace, num_rounds: int) -> dict[str, dict[str, Any]]:
    """Measure on a server; return what was found, by peer."""
    # The server is that of the tests, which are no installed package.
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from tests.s3.servers import S3Place, serve_s3

    names = [name for name in S3_NAMES if not args.only or name.split()[0] in args.only]
    state_bytes = int((args.gib or (0.25 if args.quick else 0.5)) * 2**30)
    with serve_s3("juicefs") as server:
        place = S3Place(server)
        ranks = run_ranks(
            measure_s3,
            NUM_RANKS,
            place.url,
            place.options,
            state_bytes,
            names,
            num_rounds,
            timeout_s=args.timeout,
            env=over_tcp(),
        ).values
        return _describe(ranks, (OURS, OURS), place.url)


def _describe(ranks: list[Found], ours: tuple[str, str], place: str) -> dict[str, dict[str, Any]]:
    times = combine([found.spans for found in ranks])
    errors = {name: error.replace(place, "PLACE") for name, error in ranks[0].errors.items()}
    return describe(times, ranks[0].durable, errors, ours=ours, background=BACKGROUND)


def find_missing() -> list[str]:
    """Return the packages that are not here."""
    missing = []
    for name in NEEDED:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
    return missing


def main() -> int:
    """Run the ranks, and print what they measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--gib", type=float, help="state over all ranks (2; quick or S3: 0.5; both: 0.25)"
    )
    parser.add_argument("--rounds", type=int, help="measured rounds (default: 5; quick: 3)")
    parser.add_argument("--quick", action="store_true", help="less state and fewer rounds")
    parser.add_argument("--s3", action="store_true", help="on an S3 server instead of the disk")
    parser.add_argument("--only", nargs="+", help="these libraries, beside ours")
    parser.add_argument("--folder", help="on the disk to measure (default: the temporary folder)")
    parser.add_argument(
        "--timeout", type=float, default=1800, help="seconds for everything (default: 1800)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args()
    if missing := find_missing():
        print(f"not installed: {', '.join(missing)}; run `make bench-full`", file=sys.stderr)
        return 1
    args.only = {*args.only, OURS} if args.only else None
    num_rounds = args.rounds or (3 if args.quick else 5)
    found = run_on_s3(args, num_rounds) if args.s3 else run_on_disk(args, num_rounds)
    if args.json:
        machine = describe_machine(Path(args.folder or tempfile.gettempdir()))
        print(json.dumps({"machine": machine, "versions": find_versions(), "peers": found}))
    else:
        print(draw(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
