"""Messages between trainer and writer: JSON over a Unix socket, one per packet, with a descriptor or none."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from typing import Any

__all__ = ["Channel"]

SEND_TIMEOUT_S = 30
MAX_MESSAGE_BYTES = 128 * 1024


class Channel:
    """One end. Any thread may send, one receives.

    Args:
        end: Connected socket of type ``SOCK_SEQPACKET``, which keeps messages whole.
    """

    def __init__(self, end: socket.socket) -> None:
        # A side that was stopped, rather than ended, must not stop the other one too.
        timeout = struct.pack("ll", SEND_TIMEOUT_S, 0)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        self._socket = end
        self._lock = threading.Lock()

    @staticmethod
    def pair() -> tuple[socket.socket, socket.socket]:
        """Return two connected sockets."""
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def send(self, message: dict[str, Any], fd: int | None = None) -> None:
        """Send a message, and a duplicate of ``fd`` with it.

        Raises:
            OSError: The other side has ended, or takes nothing.
        """
        data = json.dumps(message, separators=(",", ":")).encode()
        if len(data) > MAX_MESSAGE_BYTES:
            raise OSError(f"a message of {len(data)} bytes; at most {MAX_MESSAGE_BYTES}")
        with self._lock:
            socket.send_fds(self._socket, [data], [] if fd is None else [fd], socket.MSG_NOSIGNAL)

    def receive(self) -> tuple[dict[str, Any], int | None] | None:
        """Return the next message and its descriptor, which is then the caller's; ``None`` at the end."""
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, MAX_MESSAGE_BYTES, 1)
        except ConnectionResetError:
            return None
        for fd in fds:
            os.set_inheritable(fd, False)
        if not data:
            return None
        return json.loads(data), fds[0] if fds else None

    def close(self) -> None:
        """Close this end; the other one reads to its end."""
        self._socket.close()

    def end(self) -> None:
        """Send no more, but go on receiving."""
        self._socket.shutdown(socket.SHUT_WR)
