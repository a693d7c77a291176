"""Whole saves and restores while the server misbehaves."""

from __future__ import annotations

import pytest

from fsdp_ckpt.errors import IncompleteWriteError
from fsdp_ckpt.storage.retry import RetryPolicy
from fsdp_ckpt.storage.s3 import S3Store
from fsdp_ckpt.testing import FaultProxy, HttpFault
from fsdp_ckpt.testing.http_faults import HttpKind
from tests.fault.test_crash_points import PART_BYTES, LargerJob
from tests.s3.servers import S3Place

pytestmark = [pytest.mark.s3, pytest.mark.slow]


def open_root(s3: S3Place, proxy: FaultProxy | None = None, *, max_tries: int = 10) -> S3Store:
    """Open the place, through a proxy or past it; a state of two parts is an upload of two.

    It tries as often as by default, without the pauses.
    """
    options = s3.server.storage_options(proxy and proxy.endpoint)
    policy = RetryPolicy(sleep=lambda seconds: None, max_tries=max_tries)
    return S3Store(s3.url, {**options, "default_block_size": PART_BYTES}, policy=policy)


def save(root: S3Store, step: int) -> None:
    """Save a state that follows from the step."""
    with LargerJob(root, step, step).manager as manager:
        manager.save(mode="sync")


def restores(root: S3Store, step: int) -> bool:
    """Whether the newest checkpoint is that of the step, to the bit."""
    job = LargerJob(root, seed=99, step=0)
    with job.manager as manager:
        return manager.restore().step == step and job.bits() == LargerJob(root, step, step).bits()


def test_a_throttled_save_succeeds(s3: S3Place) -> None:
    """Thirty percent of the requests are refused and a body is cut on its way there and back."""
    faults = [
        HttpFault("cut_request", query="*partNumber=2*"),
        HttpFault("cut_response", method="GET", key="*/rank-*"),
        HttpFault("slow_down", share=0.3, count=None, seed=4),
    ]
    with FaultProxy(s3.server.endpoint, *faults) as proxy:
        save(open_root(s3, proxy), 1)
        assert restores(open_root(s3), 1)
        assert restores(open_root(s3, proxy), 1)
    refused = proxy.plan.fired("slow_down")
    assert len(proxy.requests) / 8 < refused < len(proxy.requests) / 2
    assert s3.open_uploads() == []
    print(f"{s3.server.kind}: {refused} of {len(proxy.requests)} requests refused")


@pytest.mark.parametrize(
    ("kind", "method", "query"),
    [
        ("slow_down", "PUT", "*partNumber=1*"),
        ("cut_request", "PUT", "*partNumber=2*"),
        ("reset", "PUT", "*partNumber=2*"),
        ("slow_down", "POST", "uploadId=*"),
    ],
)
def test_when_tries_run_out_nothing_is_left(
    s3: S3Place, kind: HttpKind, method: str, query: str
) -> None:
    """The save fails by an error of ours, no upload stays open, and the next save succeeds."""
    save(open_root(s3), 1)
    before = s3.sizes()
    fault = HttpFault(kind, count=3, method=method, query=query)
    with FaultProxy(s3.server.endpoint, fault) as proxy:
        with pytest.raises(IncompleteWriteError):
            save(open_root(s3, proxy, max_tries=3), 2)
        assert s3.open_uploads() == []
        assert s3.sizes() == before
        save(open_root(s3, proxy, max_tries=3), 2)
    assert restores(open_root(s3), 2)


@pytest.mark.parametrize(
    ("method", "key", "query"),
    [
        ("POST", "*/rank-*", "uploads*"),
        ("PUT", "*/rank-*", "*partNumber=1*"),
        ("POST", "*/rank-*", "uploadId=*"),
        ("PUT", "*/manifest.json", "*"),
    ],
)
def test_a_lost_answer_loses_nothing(s3: S3Place, method: str, key: str, query: str) -> None:
    """The request is made again, which finds that it was done; no upload stays open."""
    fault = HttpFault("lose_answer", method=method, key=key, query=query)
    with FaultProxy(s3.server.endpoint, fault) as proxy:
        save(open_root(s3, proxy), 1)
    assert restores(open_root(s3), 1)
    assert s3.open_uploads() == []
