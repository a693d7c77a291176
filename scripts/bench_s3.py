"""Time saves and restores on S3 servers on loopback: `python scripts/bench_s3.py [--quick] [--json]`.

    save, restore   CheckpointManager, synchronous; verified, and in the live tensors of every rank
    dcp             dcp.save with FsspecWriter, dcp.load with FsspecReader
    s3fs put, get   the same bytes by the client library itself, memory to object and back, an object per
                    rank, with the best of several part sizes and numbers of requests in flight

All in one run, round by round, on four ranks at once; the slowest rank counts. docs/benchmarks.md says what
each figure means.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import s3fs
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bench_parts.clock import Clock, Spans, Times, combine, run_rounds
from bench_parts.report import Goal, report
from bench_parts.training import Training
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from fsdp_ckpt import CheckpointManager, SaveOptions
from fsdp_ckpt.testing import over_tcp, run_ranks

NUM_RANKS = 4
SERVERS = ("juicefs", "rclone")
MIB = 1024 * 1024
# rclone answers a ranged GET with the checksum of the whole object, which the client takes for the range's.
CHECKSUMS = {
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
}
# Bytes per part, and requests of one rank in flight; the first is tried by --quick too.
TUNINGS = ((16 * MIB, 4), (8 * MIB, 8), (32 * MIB, 2))
GOALS = {
    "s3_save_over_dcp": Goal(1.5),
    "s3_load_over_dcp": Goal(1.5),
    "s3_save_over_s3fs": Goal(0.9),
    "s3_load_over_s3fs": Goal(0.9),
}


class S3Bench:
    """This rank's part; every method is called by every rank. What was saved last is what is loaded.

    Args:
        url: Of a folder in a bucket.
        options: For the fsspec filesystem.
        state_bytes: Over all ranks.
    """

    def __init__(self, url: str, options: dict[str, Any], state_bytes: int) -> None:
        self.clock = Clock()
        self._url, self._options = url, options
        self._training = Training(state_bytes)
        self._bytes = b"".join(
            tensor.numpy().tobytes() for tensor in self._training.local_tensors()
        )
        self.num_bytes = len(self._bytes)
        self._fs = s3fs.S3FileSystem(**options, use_listings_cache=False)
        self._num_urls = 0
        self._manager = CheckpointManager(
            f"{url}/ours",
            self._training.state,
            options=SaveOptions(mode="sync"),
            storage_options=options,
        )

    def close(self) -> None:
        """End the manager."""
        self._manager.close()

    def save(self) -> None:
        """Save, and restore it."""
        self._training.state.progress.advance(samples=1)
        self._time("save", lambda: self._manager.save().wait())
        self._time("restore", self._manager.restore)

    def dcp(self) -> None:
        """Save as DCP does, and load it."""
        state_dict, folder = self._training.state_dict(), self._new_url()
        writer = FsspecWriter(folder, **self._options)
        client = writer.fs.fs

        async def delete_each(paths: list[str]) -> list[str]:
            for path in paths:
                await client._rm_file(path)
            return paths

        # juicefs refuses the bulk delete of this client, and DCP's last rename is a copy and a delete.
        client._bulk_delete = delete_each
        self._time("dcp save", lambda: dcp.save(state_dict, storage_writer=writer))
        reader = FsspecReader(folder, **self._options)
        self._time("dcp load", lambda: dcp.load(state_dict, storage_reader=reader))

    def client(self, part_bytes: int, num_requests: int) -> None:
        """Put an object, and get it in ranges."""
        name, url = (
            f"{part_bytes // MIB} MiB x {num_requests}",
            f"{self._new_url()}/{dist.get_rank()}",
        )

        def put() -> None:
            self._fs.pipe_file(url, self._bytes, chunksize=part_bytes, max_concurrency=num_requests)

        starts = list(range(0, self.num_bytes, part_bytes))
        ends = [*starts[1:], self.num_bytes]

        def get() -> None:
            found = self._fs.cat_ranges(
                [url] * len(starts),
                starts,
                ends,
                batch_size=num_requests,
                on_error="raise",
            )
            if sum(map(len, found)) != self.num_bytes:
                raise AssertionError("s3fs has not got all bytes")

        self._time(f"s3fs put {name}", put)
        self._time(f"s3fs get {name}", get)

    def _new_url(self) -> str:
        """Return a folder of its own for one save: all methods write new objects, and none is deleted."""
        self._num_urls += 1
        return f"{self._url}/other-{self._num_urls}"

    def _time(self, name: str, move: Callable[[], object]) -> None:
        if dist.get_rank() == 0:
            os.sync()  # the server's files: nothing is written back beside this method
        start = self.clock.start()
        move()
        self.clock.stop(name, start)


def measure(
    url: str, options: dict[str, Any], state_bytes: int, num_rounds: int, num_tunings: int
) -> tuple[int, Spans]:
    """Run all methods on this rank; return its bytes and its spans."""
    bench = S3Bench(url, options, state_bytes)
    tuned = [partial(bench.client, *tuning) for tuning in TUNINGS[:num_tunings]]
    spans = run_rounds(bench.clock, [bench.save, bench.dcp, *tuned], num_rounds)
    bench.close()
    return bench.num_bytes, spans


def figures(times: Times, server: str) -> dict[str, float]:
    """Return one server's ratios."""
    median = {name: statistics.median(seconds) for name, seconds in times.items()}

    def best(verb: str) -> float:
        return min(s for name, s in median.items() if name.startswith(f"{server} s3fs {verb}"))

    saved, loaded = median[f"{server} save"], median[f"{server} restore"]
    return {
        "s3_save_over_dcp": median[f"{server} dcp save"] / saved,
        "s3_load_over_dcp": median[f"{server} dcp load"] / loaded,
        "s3_save_over_s3fs": best("put") / saved,
        "s3_load_over_s3fs": best("get") / loaded,
    }


def main() -> int:
    """Run the servers and the ranks, and print what they measured; of several servers the worst ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--gib", type=float, help="state over all ranks (default: 0.5; quick: 0.25)"
    )
    parser.add_argument("--rounds", type=int, help="measured rounds (default: 5; quick: 3)")
    parser.add_argument("--quick", action="store_true", help="one server, one tuning: under 50 s")
    parser.add_argument("--server", choices=SERVERS, help="only this one")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args()
    # The servers are those of the tests, which are no installed package.
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from tests.s3.servers import S3Place, serve_s3

    state_bytes = int((args.gib or (0.25 if args.quick else 0.5)) * 2**30)
    num_rounds = args.rounds or (3 if args.quick else 5)
    servers = [args.server] if args.server else SERVERS[: 1 if args.quick else None]
    times: Times = {}
    by_server: dict[str, dict[str, float]] = {}
    for name in servers:
        with serve_s3(name) as server:
            place = S3Place(server)
            ranks = run_ranks(
                measure,
                NUM_RANKS,
                place.url,
                {**place.options, "config_kwargs": CHECKSUMS},
                state_bytes,
                num_rounds,
                1 if args.quick else len(TUNINGS),
                timeout_s=60 + 120 * num_rounds,
                env=over_tcp(),
            ).values
        found = combine([spans for _, spans in ranks])
        times |= {f"{name} {method}": seconds for method, seconds in found.items()}
        by_server[name] = figures(times, name)
    num_bytes = sum(count for count, _ in ranks)
    ratios = {goal: min(ones[goal] for ones in by_server.values()) for goal in GOALS}
    for name, of_server in by_server.items():
        ratios |= {f"{name} {figure}": ratio for figure, ratio in of_server.items()}
    print(report(times, dict.fromkeys(times, num_bytes), ratios, GOALS, as_json=args.json))
    return 0


if __name__ == "__main__":
    sys.exit(main())
