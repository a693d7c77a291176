"""The proxy passes everything on as it is, but for the faults that a test declares."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import botocore.session
import pytest
import s3fs
from botocore.config import Config
from botocore.exceptions import ClientError, HTTPClientError, IncompleteReadError

from fsdp_ckpt.testing import FaultNotFiredError, FaultProxy, HttpFault
from tests.s3.servers import S3Place

pytestmark = pytest.mark.s3

DATA = bytes(range(256)) * 4096  # many pieces of a proxy, and more than a socket's buffer
# One of the servers answers a ranged read with the checksum of the whole object.
RANGED = {"config_kwargs": {"response_checksum_validation": "when_required"}}
Connect = Callable[[FaultProxy], Any]


@pytest.fixture
def connect(s3: S3Place) -> Connect:
    """Make a client that goes through a proxy and tries everything once."""

    def make(proxy: FaultProxy) -> Any:
        return botocore.session.get_session().create_client(
            "s3",
            region_name="us-east-1",
            endpoint_url=proxy.endpoint,
            aws_access_key_id=s3.server.key,
            aws_secret_access_key=s3.server.secret,
            config=Config(retries={"total_max_attempts": 1}),
        )

    return make


def run_without_faults(s3: S3Place, fs: Any) -> None:
    """Use what a store uses: puts, multipart uploads, ranged reads, listings, heads, deletes."""
    fs.pipe_file(f"{s3.url}/small", b"small")
    fs.pipe_file(f"{s3.url}/ä b+c/large", DATA * 12, chunksize=5 * 2**20)
    assert s3.sizes() == {"small": 5, "ä b+c/large": 12 * len(DATA)}
    assert s3.read("ä b+c/large") == DATA * 12
    assert fs.cat_file(f"{s3.url}/ä b+c/large", start=100, end=2**20) == DATA[100:]
    assert fs.cat_file(f"{s3.url}/small") == b"small"
    fs.invalidate_cache()
    assert len(fs.ls(s3.url)) == 2
    assert fs.size(f"{s3.url}/small") == 5
    fs.rm_file(f"{s3.url}/small")
    fs.pipe_file(f"{s3.url}/empty", b"")
    assert s3.sizes() == {"empty": 0, "ä b+c/large": 12 * len(DATA)}


def test_without_faults_nothing_differs(s3: S3Place) -> None:
    """Signatures hold, bytes are the same, and every request is recorded."""
    with FaultProxy(s3.server.endpoint) as proxy:
        run_without_faults(
            s3, s3fs.S3FileSystem(**s3.server.storage_options(proxy.endpoint), **RANGED)
        )
    requests = proxy.requests
    small = [r for r in requests if r.key == f"{s3.bucket}/run/small"]
    assert {r.method for r in small} >= {"PUT", "GET", "DELETE"}
    assert {r.sent_bytes for r in small if r.method == "PUT"} == {5}
    assert {r.received_bytes for r in small if r.method == "GET"} == {5}
    parts = [r for r in requests if "partNumber=" in r.query]
    assert sorted(r.sent_bytes for r in parts) == [2 * 2**20, 5 * 2**20, 5 * 2**20]
    assert all(r.key == f"{s3.bucket}/run/ä b+c/large" for r in parts)
    assert not any(r.faults for r in requests)


def test_requests_run_beside_each_other(s3: S3Place, connect: Connect) -> None:
    """Delayed requests wait at the same time, and each is passed on when its delay is over."""
    num_threads = 8
    with ThreadPoolExecutor(num_threads) as threads:
        delay = HttpFault("delay", count=num_threads, delay_s=3600.0)
        with FaultProxy(s3.server.endpoint, delay) as proxy:
            client = connect(proxy)

            def put(key: str) -> None:
                with suppress(HTTPClientError):  # the proxy ends first
                    client.put_object(Bucket=s3.bucket, Key=key, Body=DATA)

            puts = threads.map(put, [f"run/{i}" for i in range(num_threads)])
            # One after the other, the second one would be delayed in an hour.
            while proxy.plan.fired("delay") < num_threads:
                time.sleep(0.01)
            assert proxy.requests == []
        list(puts)
    with FaultProxy(s3.server.endpoint, HttpFault("delay", delay_s=0.1)) as proxy:
        begin = time.monotonic()
        connect(proxy).put_object(Bucket=s3.bucket, Key="run/late", Body=DATA)
        assert time.monotonic() - begin >= 0.1
    assert s3.sizes()["late"] == len(DATA)


def test_slow_down_is_an_answer_of_s3(s3: S3Place, connect: Connect) -> None:
    """The client sees the code, and the server never saw the request."""
    fault = HttpFault("slow_down", count=2, method="PUT", key="*/run/a")
    with FaultProxy(s3.server.endpoint, fault) as proxy:
        client = connect(proxy)
        for _ in range(2):
            with pytest.raises(ClientError) as caught:
                client.put_object(Bucket=s3.bucket, Key="run/a", Body=DATA)
            assert caught.value.response["Error"]["Code"] == "SlowDown"
            assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 503
        client.put_object(Bucket=s3.bucket, Key="run/b", Body=DATA)
        assert s3.sizes() == {"b": len(DATA)}
        client.put_object(Bucket=s3.bucket, Key="run/a", Body=DATA)
    assert [(r.status, r.faults) for r in proxy.requests] == [
        (503, ("slow_down",)),
        (503, ("slow_down",)),
        (200, ()),
        (200, ()),
    ]


def test_a_share_is_drawn_by_its_seed(s3: S3Place, connect: Connect) -> None:
    """The same requests are hit every time, about as many as the share says."""

    def hit() -> list[bool]:
        fault = HttpFault("slow_down", share=0.3, count=None, seed=7)
        with FaultProxy(s3.server.endpoint, fault) as proxy:
            client = connect(proxy)
            for _ in range(40):
                with suppress(ClientError):
                    client.head_bucket(Bucket=s3.bucket)
        assert all(r.status == (503 if r.faults else 200) for r in proxy.requests)
        return [bool(r.faults) for r in proxy.requests]

    first = hit()
    assert 5 <= sum(first) <= 19
    assert hit() == first


def test_a_cut_answer_is_short(s3: S3Place, connect: Connect) -> None:
    """The client is told the whole length and receives half; the next try receives all."""
    with FaultProxy(s3.server.endpoint, HttpFault("cut_response", method="GET")) as proxy:
        client = connect(proxy)
        client.put_object(Bucket=s3.bucket, Key="run/a", Body=DATA)
        answer = client.get_object(Bucket=s3.bucket, Key="run/a")
        assert answer["ContentLength"] == len(DATA)
        half = len(DATA) // 2
        assert answer["Body"].read(half) == DATA[:half]
        with pytest.raises(IncompleteReadError):
            answer["Body"].read(1)
        assert client.get_object(Bucket=s3.bucket, Key="run/a")["Body"].read() == DATA
    assert [r.faults for r in proxy.requests] == [(), ("cut_response",), ()]


@pytest.mark.parametrize("kind", ["cut_request", "reset", "lose_answer"])
def test_a_connection_may_break(s3: S3Place, connect: Connect, kind: Any) -> None:
    """The client gets no answer; only where the answer is lost, the server has the whole object."""
    with FaultProxy(s3.server.endpoint, HttpFault(kind, skip=1, method="PUT")) as proxy:
        client = connect(proxy)
        client.put_object(Bucket=s3.bucket, Key="run/a", Body=b"before")
        with pytest.raises(HTTPClientError):
            client.put_object(Bucket=s3.bucket, Key="run/b", Body=DATA)
    # One of the servers shows what it has of a cut upload.
    assert (s3.sizes().get("b") == len(DATA)) == (kind == "lose_answer")
    assert s3.read("a") == b"before"
    assert [(r.status, r.faults) for r in proxy.requests] == [(200, ()), (0, (kind,))]


def test_parts_are_hit_by_query(s3: S3Place, connect: Connect) -> None:
    """A fault of one part leaves the others alone."""
    with FaultProxy(s3.server.endpoint, HttpFault("slow_down", query="*partNumber=2*")) as proxy:
        client = connect(proxy)
        upload = {"Bucket": s3.bucket, "Key": "run/a"}
        upload["UploadId"] = client.create_multipart_upload(**upload)["UploadId"]
        client.upload_part(**upload, PartNumber=1, Body=DATA)
        with pytest.raises(ClientError, match="SlowDown"):
            client.upload_part(**upload, PartNumber=2, Body=DATA)
        client.abort_multipart_upload(**upload)
    assert s3.open_uploads() == []


def test_a_fault_that_did_not_fire_fails_the_test(s3: S3Place, connect: Connect) -> None:
    """A body that is not there cannot be cut, and no request matched the other one."""
    faults = [HttpFault("cut_response", method="HEAD"), HttpFault("reset", key="nowhere")]
    proxy = FaultProxy(s3.server.endpoint, *faults)
    with pytest.raises(FaultNotFiredError, match=r"HEAD.*fired 0 times.*nowhere.*fired 0"), proxy:
        connect(proxy).head_bucket(Bucket=s3.bucket)


@pytest.mark.parametrize(
    "wrong", [{"kind": "explode"}, {"kind": "reset", "share": 0}, {"kind": "reset", "count": 0}]
)
def test_a_fault_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    """At its declaration."""
    with pytest.raises(ValueError, match=r"no such kind|share in"):
        HttpFault(**wrong)
