"""An S3 server that only reads: thousands of keys at once, pages of 1,000, every request counted.

The real servers of ``servers`` take minutes to be given as much. It answers what a listing and a read ask
for, as Amazon documents ListObjectsV2 and GetObject; whatever else is asked is an error of the test.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

__all__ = ["ListedBucket", "serve_bucket"]

PAGE_KEYS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedBucket:
    """A bucket being served.

    Args:
        options: Of the storage, to reach it.
        listings: Query of each listing that was asked for.
        reads: Key of each object that was asked for.
    """

    options: dict[str, Any]
    listings: list[dict[str, str]] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)


@contextmanager
def serve_bucket(objects: Mapping[str, bytes], sizes: Mapping[str, int]) -> Iterator[ListedBucket]:
    """Serve a bucket.

    Args:
        objects: Key → content.
        sizes: Key → bytes of further objects, which can be listed and not be read.
    """
    all_sizes = {**{key: len(data) for key, data in objects.items()}, **sizes}
    keys = sorted(all_sizes)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            key = unquote(parts.path).removeprefix("/bucket").removeprefix("/")
            if key:
                bucket.reads.append(key)
                self._answer(objects[key], "application/octet-stream")
                return
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            bucket.listings.append(query)
            self._answer(_list_page(keys, all_sizes, query).encode(), "application/xml")

        def _answer(self, body: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        bucket = ListedBucket(
            options={
                "key": "key",
                "secret": "secret",
                "endpoint_url": f"http://127.0.0.1:{server.server_port}",
                "client_kwargs": {"region_name": "us-east-1"},
            }
        )
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield bucket
        finally:
            server.shutdown()
            thread.join()


def _list_page(keys: list[str], sizes: Mapping[str, int], query: Mapping[str, str]) -> str:
    """Return one page: objects and, with a delimiter, folders, a thousand of both together."""
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
    after = query.get("continuation-token") or query.get("start-after") or ""
    entries: dict[str, int | None] = {}
    is_cut = False
    for key in keys[bisect.bisect_left(keys, prefix) :]:
        if not key.startswith(prefix):
            break
        below, slash, _ = key[len(prefix) :].partition(delimiter or "\0")
        entry = f"{prefix}{below}{slash}"
        if entry <= after or entry in entries:
            continue
        if len(entries) == PAGE_KEYS:
            is_cut = True
            break
        entries[entry] = None if slash else sizes[key]
    shown = "".join(
        f"<CommonPrefixes><Prefix>{escape(entry)}</Prefix></CommonPrefixes>"
        if size is None
        else f"<Contents><Key>{escape(entry)}</Key><Size>{size}</Size></Contents>"
        for entry, size in entries.items()
    )
    token = (
        f"<NextContinuationToken>{escape(max(entries))}</NextContinuationToken>" if is_cut else ""
    )
    return (
        '<?xml version="1.0"?><ListBucketResult>'
        f"<IsTruncated>{str(is_cut).lower()}</IsTruncated>{token}{shown}</ListBucketResult>"
    )
