"""An HTTP proxy with faults, in front of a real server.

    slow = HttpFault("slow_down", share=0.3, count=None)
    with FaultProxy("http://127.0.0.1:9000", slow, HttpFault("cut_response")) as proxy:
        ...  # the client talks to proxy.endpoint

Requests reach the server as the client sent them, the Host header too, which AWS signatures cover: the client
signs for the proxy, and the server compares what it received. One thread per connection.
Invariant: a declared fault fires as often as declared, or the proxy's block raises.
"""

from __future__ import annotations

import http.client
import socket
import socketserver
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlsplit

from fsdp_ckpt.testing.http_faults import HttpFault, HttpPlan, HttpRequest

__all__ = ["FaultProxy"]

PIECE_BYTES = 256 * 1024
TIMEOUT_S = 60.0
# How long a server may take to notice that a request was cut; less than clients wait for an answer.
END_PATIENCE_S = 30.0
SLOW_DOWN = (
    b'<?xml version="1.0" encoding="UTF-8"?>'
    b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)
# What belongs to one connection, and not to the request or the answer.
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "expect"}


class FaultProxy:
    """The proxy; its threads run in this process while its block does.

    Args:
        upstream: The server, ``http://HOST:PORT``.
        *faults: Of those that hit one request, all delays and the first other one take effect.
    """

    def __init__(self, upstream: str, *faults: HttpFault) -> None:
        parts = urlsplit(upstream)
        if parts.scheme != "http" or not parts.hostname or not parts.port:
            raise ValueError(f"upstream must be http://HOST:PORT, found {upstream!r}")
        self.plan = HttpPlan(*faults)
        self._server = _Server(parts.hostname, parts.port, self.plan)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), name="fault-proxy", daemon=True
        )

    @property
    def endpoint(self) -> str:
        """Where the client must go, ``http://127.0.0.1:PORT``."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def requests(self) -> list[HttpRequest]:
        """Every request whose client knows how it ends, in that order: none is noted later than that."""
        return self.plan.requests

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        if error is None:
            self.plan.check_fired()


class _Server(socketserver.ThreadingTCPServer):
    """Accepts connections, and can end those that clients keep open."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, plan: HttpPlan) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = host, port
        self.plan = plan
        self.stopping = threading.Event()
        self._connections: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        # Not the default, which says a proper goodbye first: a reset must be one.
        self._connections.discard(request)
        request.close()

    def server_close(self) -> None:
        super().server_close()
        self.stopping.set()
        for connection in list(self._connections):
            with suppress(OSError):  # ended meanwhile
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # Clients end connections as they like; all else is a bug of the proxy, and is printed.
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _CutError(ConnectionError):
    """The connection ends here, as declared."""


class _Handler(BaseHTTPRequestHandler):
    """One connection of a client: passes its requests on, one after the other."""

    protocol_version = "HTTP/1.1"
    timeout = TIMEOUT_S
    server: _Server

    def handle_one_request(self) -> None:
        """Read one request's head, as the base class does, whatever its method is."""
        self.raw_requestline = self.rfile.readline(65537)
        if not self.raw_requestline or not self.parse_request():
            self.close_connection = True
            return
        path, _, query = self.path.partition("?")
        self.seen = HttpRequest(
            method=self.command,
            key=unquote(path).removeprefix("/"),
            query=query,
            sent_bytes=int(self.headers.get("Content-Length") or 0),
        )
        self.is_noted = False
        try:
            self._pass_on()
        finally:
            self._note()

    def _note(self) -> None:
        """Record the request, before the client hears of its end: it may look at the record right then."""
        if not self.is_noted:
            self.is_noted = True
            self.server.plan.note(self.seen)

    def _draw(self, *kinds: Any) -> str | None:
        """Wait for what is delayed; return the kind of the other fault that is due."""
        struck = None
        for fault in self.server.plan.draw(self.seen, *kinds):
            self.seen = replace(self.seen, faults=(*self.seen.faults, fault.kind))
            if fault.kind == "delay":
                self.server.stopping.wait(fault.delay_s)
            else:
                struck = fault.kind
        return struck

    def _pass_on(self) -> None:
        struck = self._draw("delay", "slow_down", "reset", "cut_request", "lose_answer")
        if struck == "reset":
            self._reset()
        if struck == "slow_down":
            for _ in self._body():
                pass
            self._answer(503, "Slow Down", [("Content-Type", "application/xml")], len(SLOW_DOWN))
            self.wfile.write(SLOW_DOWN if self.command != "HEAD" else b"")
            return
        server = http.client.HTTPConnection(*self.server.upstream, timeout=TIMEOUT_S)
        try:
            self._send(server, cut=struck == "cut_request")
            response = server.getresponse()
            self._return(response, lose=struck == "lose_answer")
        except (http.client.HTTPException, TimeoutError) as e:
            raise ConnectionError(f"no answer of the server: {e}") from e
        finally:
            server.close()

    def _send(self, server: http.client.HTTPConnection, *, cut: bool) -> None:
        server.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in HOP_BY_HOP:
                server.putheader(name, value)
        is_chunked = "Content-Length" not in self.headers and self._is_chunked()
        if is_chunked:
            server.putheader("Transfer-Encoding", "chunked")
        server.endheaders()
        left = self.seen.sent_bytes // 2 if cut else sys.maxsize
        for piece in self._body():
            server.send(_chunk(piece) if is_chunked else piece[:left])
            left -= len(piece)
            if left <= 0:
                _await_end(server.sock)
                self._reset()
        if is_chunked:
            server.send(_chunk(b""))

    def _is_chunked(self) -> bool:
        return "chunked" in self.headers.get("Transfer-Encoding", "").lower()

    def _body(self) -> Iterator[bytes]:
        """Read the request's body in pieces; the base class has answered ``Expect: 100-continue``."""
        if self._is_chunked():
            while size := int(self.rfile.readline().split(b";")[0], 16):
                yield self._read(size)
                self.rfile.readline()
            while self.rfile.readline().strip():  # trailers
                pass
            return
        left = self.seen.sent_bytes
        while left:
            piece = self._read(min(left, PIECE_BYTES))
            yield piece
            left -= len(piece)

    def _read(self, num_bytes: int) -> bytes:
        data = self.rfile.read(num_bytes)
        if len(data) < num_bytes:
            raise ConnectionError("the client ended its request early")
        return data

    def _return(self, response: http.client.HTTPResponse, *, lose: bool) -> None:
        num_bytes = response.length
        has_length = num_bytes is not None or self.command == "HEAD"
        self.seen = replace(self.seen, received_bytes=num_bytes or 0)
        if lose:
            response.read()
            self._reset()
        is_cut = self._draw("cut_response") is not None
        left = self.seen.received_bytes // 2 if is_cut else sys.maxsize
        headers = [(k, v) for k, v in response.getheaders() if k.lower() not in HOP_BY_HOP]
        if not has_length:
            headers.append(("Transfer-Encoding", "chunked"))
        self._answer(response.status, response.reason, headers)
        while piece := response.read(PIECE_BYTES):
            self.wfile.write(piece[:left] if has_length else _chunk(piece))
            left -= len(piece)
            if left <= 0:
                raise _CutError
        if not has_length:
            self.wfile.write(_chunk(b""))

    def _answer(
        self,
        status: int,
        reason: str,
        headers: list[tuple[str, str]],
        num_bytes: int | None = None,
    ) -> None:
        self.seen = replace(self.seen, status=status)
        self._note()
        self.send_response_only(status, reason)
        for name, value in headers:
            self.send_header(name, value)
        if num_bytes is not None:
            self.send_header("Content-Length", str(num_bytes))
        self.end_headers()

    def _reset(self) -> None:
        """End the client's connection by a reset: unsent data is dropped, and it is no proper end."""
        self._note()
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        raise _CutError

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the plan has the requests."""


def _await_end(server: socket.socket) -> None:
    """End a cut request, and wait until the server is done with it: what it does next is no race."""
    server.shutdown(socket.SHUT_WR)
    server.settimeout(END_PATIENCE_S)
    with suppress(ConnectionError, TimeoutError):
        while server.recv(PIECE_BYTES):
            pass


def _chunk(data: bytes) -> bytes:
    """Frame a piece of a body whose length is not told first; no data ends it."""
    return b"%x\r\n%b\r\n" % (len(data), data)
