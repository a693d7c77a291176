"""The servers that the tests of S3 rest on: there, separate, and gone afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import s3fs

from tests.s3.servers import KINDS, S3Place, find_program, serve_s3

pytestmark = pytest.mark.s3

STARTER = """
import sys, time
from tests.s3.servers import serve_s3
with serve_s3(sys.argv[1]) as server:
    print(server.pid, flush=True)
    time.sleep(600)
"""


def test_a_place_is_a_bucket_of_its_own(s3: S3Place) -> None:
    """What is written is there to the bit, with its key and size, and in no other bucket."""
    other = S3Place(s3.server)
    fs = s3fs.S3FileSystem(**s3.options)
    fs.pipe_file(f"{s3.url}/a/b", b"content")
    assert s3.sizes() == {"a/b": 7}
    assert s3.read("a/b") == b"content"
    assert other.sizes() == {}


def test_open_uploads_are_seen(s3: S3Place) -> None:
    """A multipart upload is open until it is aborted."""
    fs = s3fs.S3FileSystem(**s3.options)
    upload = {"Bucket": s3.bucket, "Key": "run/part"}
    upload["UploadId"] = fs.call_s3("create_multipart_upload", **upload)["UploadId"]
    fs.call_s3("upload_part", **upload, PartNumber=1, Body=b"content")
    assert s3.open_uploads() == ["run/part"]
    fs.call_s3("abort_multipart_upload", **upload)
    assert s3.open_uploads() == []
    assert s3.sizes() == {}


def test_a_wrong_secret_is_refused(s3: S3Place) -> None:
    """Signatures are checked, so a proxy that breaks them is noticed."""
    fs = s3fs.S3FileSystem(**{**s3.options, "secret": "another"})
    with pytest.raises(PermissionError):
        fs.pipe_file(f"{s3.url}/a", b"content")
    assert s3.sizes() == {}


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_ends_with_its_block(kind: str) -> None:
    """Afterwards its process is gone."""
    with serve_s3(kind) as server:
        os.kill(server.pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_dies_with_its_starter(kind: str) -> None:
    """Also when that is killed and tears nothing down."""
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, kind],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
    finally:
        starter.send_signal(signal.SIGKILL)
        starter.communicate()
    end = time.monotonic() + 100
    while is_running(pid):
        assert time.monotonic() < end
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Whether the process is there and not a zombie that no one has waited for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_missing_package_is_named() -> None:
    """It is an error that tells what to install, not a skipped test."""
    with pytest.raises(RuntimeError, match=r"no-such-package is not installed.*make test"):
        find_program("no-such-package", "program")
