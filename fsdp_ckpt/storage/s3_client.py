"""Requests to an S3 server through s3fs, from any thread and after a fork.

Invariant: one layer retries, this one, so that number and time are bounded. A process uses only a client that
it made itself: the event loop and the connections of another one do not survive a fork.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import weakref
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import s3fs
from fsspec.asyn import get_loop
from s3fs.core import AioConfig

from fsdp_ckpt.storage.retry import RetryPolicy
from fsdp_ckpt.storage.s3_errors import is_transient

__all__ = ["MOST_REQUESTS", "S3Client", "usual_concurrency"]

T = TypeVar("T")

# Requests of a rank in flight: so many keep a network busy. But each wants a part of a core: on ranks that
# have less, more requests only take turns, while the other end holds what they carry.
FEWEST_REQUESTS, MOST_REQUESTS, REQUESTS_PER_CORE = 2, 8, 4
# A server that takes or gives bytes more slowly than this, after a minute, is taken for dead.
SLOWEST_BYTES_PER_S = 1024 * 1024
PATIENCE_S = 60.0
# What decides how the client is made, and whether listings are kept, is not the user's to choose.
_OURS = (
    "asynchronous",
    "loop",
    "skip_instance_cache",
    "use_listings_cache",
    "listings_expiry_time",
    "max_paths",
)


def usual_concurrency() -> int:
    """Return how many requests this rank has in flight, by the cores that are its own."""
    cores = len(os.sched_getaffinity(0)) / int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return min(max(int(REQUESTS_PER_CORE * cores), FEWEST_REQUESTS), MOST_REQUESTS)


class S3Client:
    """An s3fs filesystem per process, made when first needed.

    Args:
        options: Of ``s3fs.S3FileSystem``, as plain data. ``max_concurrency`` and ``default_block_size``
            say how many parts are in flight, and of what size;
            ``config_kwargs["retries"]["max_attempts"]`` how often a request is tried again.
        policy: How failed requests are tried again.
    """

    def __init__(
        self, options: Mapping[str, Any] | None = None, policy: RetryPolicy | None = None
    ) -> None:
        chosen = {name: value for name, value in (options or {}).items() if name not in _OURS}
        config = dict(chosen.pop("config_kwargs", None) or {})
        retries = config.pop("retries", None) or {}
        self._policy = policy or RetryPolicy()
        if "total_max_attempts" in retries:
            self._policy = replace(self._policy, max_tries=int(retries["total_max_attempts"]))
        elif "max_attempts" in retries:
            self._policy = replace(self._policy, max_tries=int(retries["max_attempts"]) + 1)
        self.concurrency = int(chosen.get("max_concurrency") or usual_concurrency())
        self.part_bytes: int | None = chosen.get("default_block_size")
        self._options = chosen
        self._config = {
            "connect_timeout": 10,
            "read_timeout": PATIENCE_S,  # putting the parts of a large object together takes a while
            "max_pool_connections": max(32, 4 * self.concurrency),
            **_unchecked_reads(),
            **config,
            "retries": {"max_attempts": 0},
            # On plain HTTP as on HTTPS: hashing each body twice more, here and there, halves the speed, and
            # the CRC that goes along finds what the network damages.
            "s3": {"payload_signing_enabled": False} | (config.get("s3") or {}),
        }
        self._pid = 0
        self._fs = self._filesystem()
        self.secrets = [
            str(value)
            for value in (self._fs.key, self._fs.secret, self._fs.token)
            if value is not None
        ]

    def _filesystem(self) -> Any:
        # No lock: after a fork, another thread of the parent might hold it for ever.
        if self._pid != os.getpid():
            fs = s3fs.S3FileSystem(
                **self._options,
                config_kwargs=self._config,
                # s3fs closes a synchronous one when it is collected and at exit, also in a forked child,
                # where only _close knows better.
                asynchronous=True,
                skip_instance_cache=True,
                use_listings_cache=False,
            )
            fs.retries = 1
            weakref.finalize(self, _close, fs, os.getpid())
            self._fs, self._pid = fs, os.getpid()
        return self._fs

    def split(self, url: str) -> tuple[str, str]:
        """Return bucket and key of a URL."""
        bucket, key, _ = self._fs.split_path(url)
        return bucket, key

    def call(self, method: str, *, body_bytes: int = 0, **arguments: Any) -> dict[str, Any]:
        """Make one request of S3's API, once.

        Args:
            method: botocore's name of it.
            body_bytes: Size of what is sent.
            **arguments: The method's.

        Raises:
            Exception: s3fs's or botocore's error.
        """

        async def request(fs: Any) -> dict[str, Any]:
            return dict(await fs._call_s3(method, **arguments))

        return self.run(request, body_bytes)

    def call_again(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Make a request, again where that may help."""
        return self.retry(lambda earlier: self.call(method, **arguments))

    def retry(self, action: Callable[[int], T]) -> T:
        """Run ``action`` until it succeeds or trying again is of no use; see :meth:`RetryPolicy.run`."""
        return self._policy.run(action, is_transient)

    def run(self, request: Callable[[Any], Coroutine[Any, Any, T]], num_bytes: int = 0) -> T:
        """Run a coroutine on the filesystem, once, on fsspec's thread.

        Args:
            request: Gets the filesystem of this process.
            num_bytes: Bytes to send or receive; the longest it may take follows from them.
        """
        fs = self._filesystem()

        async def connected() -> T:
            client = await fs.set_session()
            client.meta.events.register_last(
                "before-call.s3", _send_at_once, unique_id="fsdp-ckpt-send-at-once"
            )
            return await request(fs)

        limit_s = PATIENCE_S + num_bytes / SLOWEST_BYTES_PER_S
        future = asyncio.run_coroutine_threadsafe(
            asyncio.wait_for(connected(), limit_s), get_loop()
        )
        try:
            return future.result()
        except BaseException:
            future.cancel()  # where it was the wait that was interrupted
            raise

    @property
    def sends_checksums(self) -> bool:
        """Whether bodies go with a checksum, which some servers cannot take; by botocore's own option."""
        made = self._filesystem()._s3
        chosen = getattr(made.meta.config, "request_checksum_calculation", None) if made else None
        return chosen != "when_required"


def _unchecked_reads() -> dict[str, str]:
    """Return the option to leave answers unchecked, where botocore has it (1.36 and later)."""
    # Blocks have digests of their own, and rclone sends the checksum of the object with a part of it.
    name = "response_checksum_validation"
    return {name: "when_required"} if name in AioConfig.OPTION_DEFAULTS else {}


def _send_at_once(params: dict[str, Any], **event: Any) -> None:
    """Do not ask the server first whether it wants the body: some never say so, and it takes a round trip."""
    params["headers"].pop("Expect", None)


def _close(fs: Any, pid: int) -> None:
    """Close a filesystem's connections where they were opened; leave them alone anywhere else."""
    if os.getpid() != pid:
        # Never collected: closing a connection takes it out of the epoll instance that parent and child
        # share, and the parent's next request would wait for its answer in vain.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(fs))
        return
    loop = get_loop()
    if fs._s3 is None or loop.is_closed() or not loop.is_running():
        return
    closed = asyncio.run_coroutine_threadsafe(fs._s3creator.__aexit__(None, None, None), loop)
    try:
        on_loop = asyncio.get_running_loop() is loop
    except RuntimeError:
        on_loop = False
    if not on_loop:
        # At exit the loop's thread is about to be stopped.
        closed.exception(timeout=1)
