"""What S3 adds to the contract of stores: parts, cut connections, throttling, rivals, forks."""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import random
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fsdp_ckpt.errors import (
    AlreadyCommittedError,
    CheckpointError,
    CorruptCheckpointError,
    NotFoundError,
    StorageError,
)
from fsdp_ckpt.storage import Store, open_store
from fsdp_ckpt.storage.in_order import InOrderWriter
from fsdp_ckpt.storage.retry import RetryPolicy
from fsdp_ckpt.storage.s3 import S3Store
from fsdp_ckpt.storage.s3_client import usual_concurrency
from fsdp_ckpt.storage.s3_listing import list_level
from fsdp_ckpt.storage.s3_writer import choose_part_bytes
from fsdp_ckpt.storage.shard_io import digest, write_shard
from fsdp_ckpt.testing import FaultProxy, HttpFault
from tests.s3.servers import S3Place
from tests.shards import read_ranges

pytestmark = [pytest.mark.s3, pytest.mark.slow]

MIB = 2**20
PART = 5 * MIB
HEADER = 4096
DATA = random.Random(0).randbytes(3 * PART + 12_345)
# As patient in number as the default, without the waiting.
AT_ONCE = RetryPolicy(sleep=lambda seconds: None)
TWICE = RetryPolicy(sleep=lambda seconds: None, max_tries=2)


def open_it(s3: S3Place, proxy: FaultProxy | None = None, policy: RetryPolicy = AT_ONCE) -> S3Store:
    options = s3.server.storage_options(proxy.endpoint if proxy else None)
    return S3Store(s3.url, {**options, "default_block_size": PART}, policy=policy)


def objects(s3: S3Place) -> dict[str, int]:
    """Return what is there; rclone shows an empty folder as well."""
    return {key: num_bytes for key, num_bytes in s3.sizes().items() if key}


def uploads(s3: S3Place) -> list[str]:
    """Return the open uploads; rclone says of none that it does not exist."""
    with contextlib.suppress(FileNotFoundError):
        return s3.open_uploads()
    return []


def put(store: Store, key: str, data: bytes) -> None:
    writer = InOrderWriter(store.write(key, len(data)), len(data), 3)
    writer.write_at(0, memoryview(data))
    writer.commit()


def write_blocks(store: Store, data: bytes, key: str = "a/shard") -> None:
    image = memoryview(bytearray(HEADER) + data)
    write_shard(
        store.write(key, len(image)),
        image,
        data_offset=HEADER,
        block_bytes=MIB,
        seal=lambda digests: ",".join(digests).encode().ljust(HEADER),
        num_threads=store.concurrency,
    )


def read_blocks(store: Store, data: bytes, key: str = "a/shard") -> bytearray:
    buffer = bytearray(len(data))
    read_ranges(
        store,
        key,
        [(0, len(data))],
        memoryview(buffer),
        data_offset=HEADER,
        block_bytes=MIB,
        digests=[digest(data[at : at + MIB]) for at in range(0, len(data), MIB)],
        explain=lambda start, stop: "w",
    )
    return buffer


# --- parts ---


@pytest.mark.parametrize("num_bytes", [0, 1, PART, PART + 1, len(DATA)])
def test_objects_of_any_number_of_parts(s3: S3Place, num_bytes: int) -> None:
    """One put or many parts: the object is there, whole, and no upload stays open."""
    store = open_it(s3)
    put(store, "a/k", DATA[:num_bytes])
    assert s3.read("a/k") == store.read("a/k") == DATA[:num_bytes]
    assert store.size("a/k") == num_bytes
    assert uploads(s3) == []
    buffer = bytearray(num_bytes)
    store.read_into("a/k", 0, memoryview(buffer))
    assert buffer == DATA[:num_bytes]


def test_a_shard_goes_out_in_parts_the_header_last(s3: S3Place) -> None:
    """Every part but the last has one size, and the first one, which holds the header, is sent at the end."""
    with FaultProxy(s3.server.endpoint) as proxy:
        write_blocks(open_it(s3, proxy), DATA)
    sent = [r for r in proxy.requests if "partNumber=" in r.query]
    sizes = {int(r.query.split("partNumber=")[1].split("&")[0]): r.sent_bytes for r in sent}
    assert sizes == {1: PART, 2: PART, 3: PART, 4: HEADER + len(DATA) - 3 * PART}
    assert "partNumber=1" in sent[-1].query
    assert read_blocks(open_it(s3), DATA) == DATA


def test_parts_follow_from_the_size() -> None:
    """Never more than 10,000, never below 5 MiB or above 5 GiB, all of whole MiB."""
    for num_bytes in (0, 1, MIB, 2**30, 2**34, 2**40, 48 * 2**40):
        for wanted in (None, 1, 100 * MIB):
            size = choose_part_bytes(num_bytes, wanted)
            assert 5 * MIB <= size <= 5 * 2**30
            assert size % MIB == 0
            assert num_bytes <= 10_000 * size
    assert choose_part_bytes(10**9, 20 * MIB) == 20 * MIB
    with pytest.raises(StorageError, match="S3 takes"):
        choose_part_bytes(10**14)


def test_requests_in_flight_follow_from_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of one machine share its cores; alone a program has them all."""
    found = {}
    for cores, ranks in ((2, "4"), (2, ""), (192, "8"), (4, "4"), (6, "4"), (1, "64")):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        found[cores, ranks] = usual_concurrency()
    assert list(found.values()) == [2, 8, 8, 4, 6, 2]


def test_nothing_is_there_before_the_commit(s3: S3Place) -> None:
    """An object of one part and one of many appear when they are committed, and not when written."""
    store = open_it(s3)
    for data in (b"small", DATA):
        writer = InOrderWriter(store.write("a/k", len(data)), len(data))
        writer.write_at(0, memoryview(data))
        assert objects(s3) == {}
        writer.commit()
        assert objects(s3) == {"a/k": len(data)}
        store.delete("a/k")


@pytest.mark.parametrize("num_written", [0, PART])
def test_an_abort_leaves_nothing(s3: S3Place, num_written: int) -> None:
    """Neither an object nor an open upload stays, nor appears later."""
    store = open_it(s3)
    for num_bytes in (PART, 2 * PART):
        writer = store.write("a/k", num_bytes)
        if num_written:
            writer.write_at(0, memoryview(DATA)[:num_written])
        writer.abort()
        del writer
        gc.collect()
    assert objects(s3) == {}
    assert uploads(s3) == []


def test_what_is_no_part_is_refused(s3: S3Place) -> None:
    """A range that starts or ends inside a part, or is missing at the end, is an error of the caller's."""
    writer = open_it(s3).write("k", 2 * PART + 1)
    for start, stop in ((0, PART - 1), (1, PART + 1), (PART, PART + 5), (2 * PART, 2 * PART)):
        with pytest.raises(StorageError, match="no part"):
            writer.write_at(start, memoryview(DATA)[start:stop])
    writer.write_at(0, memoryview(DATA)[:PART])
    with pytest.raises(StorageError, match="1 of 3 parts"):
        writer.commit()
    writer.abort()
    assert uploads(s3) == []


# --- faults ---


def test_throttling_and_a_cut_body_are_survived(s3: S3Place) -> None:
    """30 % of requests are answered 503, a body is cut on its way there and one on its way back."""
    faults = (
        HttpFault("slow_down", share=0.3, count=None, seed=3),
        HttpFault("cut_request", method="PUT", query="*partNumber=2*"),
        HttpFault("cut_response", method="GET", key="*/shard"),
    )
    with FaultProxy(s3.server.endpoint, *faults) as proxy:
        store = open_it(s3, proxy)
        write_blocks(store, DATA)
        assert read_blocks(store, DATA) == DATA
        store.create("a/note", b"note")
        assert store.child("a").list_files() == {"note": 4, "shard": HEADER + len(DATA)}
    assert uploads(s3) == []
    assert s3.read("a/shard")[HEADER:] == DATA


def test_a_cut_answer_goes_on_where_it_was_cut(s3: S3Place) -> None:
    """What has arrived is not asked for again."""
    put(open_it(s3), "k", DATA)
    buffer = bytearray(PART)
    with FaultProxy(s3.server.endpoint, HttpFault("cut_response", method="GET")) as proxy:
        open_it(s3, proxy).read_into("k", 77, memoryview(buffer))
    assert buffer == DATA[77 : 77 + PART]
    first, second = (r.received_bytes for r in proxy.requests if r.method == "GET")
    assert first == PART
    assert second <= PART // 2 + 1


@pytest.mark.parametrize("kind", ["slow_down", "reset", "cut_request"])
def test_when_tries_run_out_nothing_stays(s3: S3Place, kind: Any) -> None:
    """A part that never arrives fails the write; its upload is aborted, at the second try if need be."""
    faults = (
        HttpFault(kind, method="PUT", query="*partNumber=2*", count=2),
        HttpFault("slow_down", method="DELETE"),
    )
    with FaultProxy(s3.server.endpoint, *faults) as proxy:
        store = open_it(s3, proxy, TWICE)
        with pytest.raises(StorageError, match="tried 2 times") as caught:
            write_blocks(store, DATA)
        assert caught.value.retryable
        assert uploads(s3) == []
        assert objects(s3) == {}
        write_blocks(store, DATA)
    assert read_blocks(open_it(s3), DATA) == DATA


def test_a_lost_answer_leaves_no_second_upload(s3: S3Place) -> None:
    """An upload that the client never heard of is found and ended."""
    fault = HttpFault("lose_answer", method="POST", query="*uploads*")
    with FaultProxy(s3.server.endpoint, fault) as proxy:
        put(open_it(s3, proxy), "k", DATA)
    assert uploads(s3) == []
    assert s3.read("k") == DATA


def test_a_completion_whose_answer_is_lost_is_one(s3: S3Place) -> None:
    """The second try finds the upload gone and the object there."""
    fault = HttpFault("lose_answer", method="POST", query="*uploadId=*")
    with FaultProxy(s3.server.endpoint, fault) as proxy:
        put(open_it(s3, proxy), "k", DATA)
    assert s3.read("k") == DATA


def test_a_completion_that_is_given_up_leaves_nothing(s3: S3Place) -> None:
    """Where no answer ever comes, the object may be there: it is removed with the upload."""
    fault = HttpFault("lose_answer", method="POST", query="*uploadId=*", count=1)
    with FaultProxy(s3.server.endpoint, fault) as proxy:
        store = open_it(s3, proxy, RetryPolicy(max_tries=1))
        with pytest.raises(StorageError):
            write_blocks(store, DATA)
    assert objects(s3) == {}
    assert uploads(s3) == []


@pytest.mark.parametrize("kind", ["lose_answer", "cut_request", "slow_down", "reset"])
def test_a_create_that_is_tried_again_does_not_lose_to_itself(s3: S3Place, kind: Any) -> None:
    """Whatever becomes of the first try, the create succeeds and its bytes are there."""
    with FaultProxy(s3.server.endpoint, HttpFault(kind, method="PUT")) as proxy:
        open_it(s3, proxy).create("manifest.json", DATA[:1000])
    assert s3.read("manifest.json") == DATA[:1000]


def test_what_no_retry_mends_is_not_tried_again(s3: S3Place) -> None:
    """Absent and denied are one request each."""
    with FaultProxy(s3.server.endpoint) as proxy:
        with pytest.raises(NotFoundError):
            open_it(s3, proxy).read("none")
        options = s3.server.storage_options(proxy.endpoint) | {"secret": "not-the-secret"}
        with pytest.raises(StorageError) as caught:
            S3Store(s3.url, options).read("none")
    assert not caught.value.retryable
    assert len(proxy.requests) == 2


def test_a_dead_server_is_an_error_in_bounded_time(s3: S3Place) -> None:
    """Nobody at the endpoint: some tries, then an error that says so."""
    options = s3.server.storage_options("http://127.0.0.1:1")
    options["config_kwargs"] = {"retries": {"max_attempts": 2}}
    with pytest.raises(StorageError, match="tried 3 times") as caught:
        open_store(s3.url, **options).list_files()
    assert caught.value.retryable


def test_what_is_larger_than_expected_takes_one_request(s3: S3Place) -> None:
    """The size comes with the answer: nobody asks for it first, and the rest is not read."""
    with FaultProxy(s3.server.endpoint) as proxy:
        store = open_it(s3, proxy)
        store.put("k", DATA)
        assert store.read("k", len(DATA)) == DATA
        with pytest.raises(CorruptCheckpointError, match=f"at most {len(DATA) - 1} expected"):
            store.read("k", len(DATA) - 1)
    assert {request.method for request in proxy.requests} == {"PUT", "GET"}


# --- what others do ---


def test_rivals_never_both_win_with_different_bytes_there(s3: S3Place) -> None:
    """Whoever believes to have won after another did overwrote it; the bytes there are a winner's."""
    stores = [open_it(s3) for _ in range(4)]
    start = threading.Barrier(len(stores))
    winners: list[int] = []

    def compete(i: int) -> None:
        start.wait()
        with contextlib.suppress(AlreadyCommittedError):
            stores[i].create("k", b"%d" % i * 1000)
            winners.append(i)

    with ThreadPoolExecutor(len(stores)) as threads:
        list(threads.map(compete, range(len(stores))))
    assert s3.read("k") in [b"%d" % i * 1000 for i in winners]
    with pytest.raises(AlreadyCommittedError):
        stores[0].create("k", b"late")


def test_a_rival_that_overwrites_is_noticed(s3: S3Place) -> None:
    """On a server that knows no conditional put, the loser learns it by reading back."""

    class Rival(S3Store):
        def once(self, method: str, key: str, **arguments: Any) -> dict[str, Any]:
            answer = super().once(method, key, **arguments)
            if method == "put_object":
                open_it(s3).put(key, b"rival")
            return answer

    store = Rival(s3.url, s3.server.storage_options())
    with pytest.raises(AlreadyCommittedError):
        store.create("k", b"mine")
    assert s3.read("k") == b"rival"


def test_another_process_is_seen_at_once(s3: S3Place) -> None:
    """Commit, overwrite and prune by others show in the next look, whatever this process has seen."""
    mine, theirs = open_it(s3), open_it(s3)
    assert mine.list_folders() == []
    theirs.create("step/manifest", b"one")
    assert mine.list_folders() == ["step"]
    assert mine.child("step").list_files() == {"manifest": 3}
    theirs.put("step/manifest", b"three")
    assert mine.child("step").list_files() == {"manifest": 5}
    assert mine.size("step/manifest") == 5
    theirs.delete("step/manifest")
    assert mine.child("step").list_files() == {}
    with pytest.raises(NotFoundError):
        mine.size("step/manifest")


class ShortPages(S3Store):
    """Gets three names a page."""

    def _list_page(self, prefix: str, **arguments: Any) -> dict[str, Any]:
        return super()._list_page(prefix, **{**arguments, "MaxKeys": 3})


def test_long_listings_are_complete(s3: S3Place) -> None:
    """A listing of more than one page has every name once."""
    store = ShortPages(s3.url, s3.options)
    names = [f"{i}" for i in range(7)]
    for name in names:
        store.put(f"files/{name}", b"")
    assert sorted(store.child("files").list_files()) == names
    assert store.list_folders() == ["files"]


def test_a_listing_that_goes_in_circles_is_an_error() -> None:
    """A server that repeats its pages is found out: rclone does, with folders and objects on one level."""

    def next_page(position: dict[str, str]) -> dict[str, Any]:
        token = "1" if position.get("ContinuationToken") == "0" else "0"
        return {"IsTruncated": True, "NextContinuationToken": token}

    with pytest.raises(StorageError, match="without end"):
        list_level(next_page, "run/")


def test_places_that_are_none(s3: S3Place) -> None:
    """A bucket that does not exist is an error and no fresh start; an object is no folder."""
    store = open_it(s3)
    store.create("k", b"1")
    with pytest.raises(StorageError, match="not a folder"):
        store.child("k").list_files()
    nowhere = open_store("s3://no-such-bucket-here/run", **s3.options)
    with pytest.raises(StorageError, match="no such bucket"):
        nowhere.list_folders()
    with pytest.raises(StorageError):
        put(nowhere, "k", b"1")
    with pytest.raises(StorageError, match="no bucket"):
        open_store("s3://", **s3.options)


# --- forks, options, secrets ---


def use(store: Store, name: str) -> None:
    put(store, name, DATA)
    assert store.read(name) == DATA


def open_for_one_try(url: str, options: dict[str, Any]) -> Store:
    """Open a store that asks once: that a child has closed the connection is an error, sooner or later."""
    return open_store(url, **options, config_kwargs={"retries": {"total_max_attempts": 1}})


def test_a_forked_child_and_its_parent_both_go_on(s3: S3Place) -> None:
    """A data worker may use the store that its parent has used, and ending the worker hurts no one."""
    store = open_for_one_try(s3.url, s3.options)
    use(store, "before")
    fork = multiprocessing.get_context("fork")
    for name, action in (("idle", lambda: None), ("busy", lambda: use(store, "child"))):
        worker = fork.Process(target=action, name=name)
        worker.start()
        worker.join()
        assert worker.exitcode == 0
        use(store, f"after-{name}")
    assert store.read("child") == DATA


FORK_AND_EXIT = """
import gc, json, os, sys
from tests.s3.test_s3_store import open_for_one_try
store = open_for_one_try(*json.loads(sys.argv[1]))
store.create("before", b"1")
pid = os.fork()
if pid == 0:
    del store
    gc.collect()
    sys.exit(0)
os.waitpid(pid, 0)
store.create("after", b"2")
"""


def test_a_forked_child_that_exits_as_programs_do_hurts_no_one(s3: S3Place) -> None:
    """A child that lets go of everything and runs its exit handlers leaves the parent's connections alone."""
    program = [sys.executable, "-c", FORK_AND_EXIT, json.dumps([s3.url, s3.options])]
    subprocess.run(program, cwd=Path(__file__).parents[2], check=True, timeout=280)
    assert objects(s3) == {"before": 1, "after": 1}


def test_options_are_plain_data(s3: S3Place) -> None:
    """Another program opens the store by URL and options out of JSON."""
    options = {**s3.options, "max_concurrency": 3, "default_block_size": PART}
    options["config_kwargs"] = {"read_timeout": 30, "retries": {"total_max_attempts": 2}}
    store = open_store(s3.url, **json.loads(json.dumps(options)))
    assert store.concurrency == 3
    use(store, "k")


def test_checksums_can_be_left_out(s3: S3Place) -> None:
    """The option of botocore's for servers that know no checksums holds for parts and puts."""
    config = {"request_checksum_calculation": "when_required"}
    store = open_store(s3.url, **s3.options, default_block_size=PART, config_kwargs=config)
    use(store, "k")
    store.create("note", b"1")
    assert isinstance(store, S3Store)
    assert not store.sends_checksums
    assert open_it(s3).sends_checksums


def test_bodies_can_be_signed(s3: S3Place) -> None:
    """Where the user wants signatures over the bodies, they are made, and hold."""
    config = {"s3": {"payload_signing_enabled": True}}
    use(open_store(s3.url, **s3.options, default_block_size=PART, config_kwargs=config), "k")


def test_credentials_come_from_the_environment(
    s3: S3Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without options, the usual AWS variables are what counts."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.server.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.server.secret)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3.server.endpoint)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    use(open_store(s3.url), "k")


def collect_texts(error: CheckpointError, store: Store) -> Sequence[str]:
    return [str(error), repr(error), repr(store), store.url, repr(store.child("a"))]


def test_secrets_are_in_no_message(s3: S3Place) -> None:
    """Neither messages nor representations hold the key or the secret, even where the server says them."""
    key, secret = "AKIASECRETSECRET", "TOPSECRETSECRET"
    options = s3.server.storage_options() | {"key": key, "secret": secret}
    store = open_store(s3.url, **options)
    for verb in (store.list_files, lambda: store.read("k"), lambda: store.create("k", b"1")):
        with pytest.raises(StorageError) as caught:
            verb()
        for text in collect_texts(caught.value, store):
            assert key not in text
            assert secret not in text
    with pytest.raises(StorageError, match="not in the URL") as refused:
        open_store(s3.url.replace("s3://", f"s3://{key}:{secret}@"), **s3.options)
    assert secret not in str(refused.value)
