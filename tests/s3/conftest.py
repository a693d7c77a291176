"""An empty bucket on a real S3 server, for each test and each kind of server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.s3.servers import S3Place, S3Server, serve_s3


@pytest.fixture(scope="session", params=["juicefs", "rclone"])
def s3_server(request: pytest.FixtureRequest) -> Iterator[S3Server]:
    """A server on loopback, for the whole session."""
    with serve_s3(request.param) as server:
        yield server


@pytest.fixture
def s3(s3_server: S3Server) -> S3Place:
    """A bucket that only this test uses: ``url``, ``options``, and what is in it."""
    return S3Place(s3_server)
