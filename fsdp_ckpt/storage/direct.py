"""One file through two descriptors: whole pages direct, the rest through the page cache.

    byte 0      4096                                   8192·n       end
         | head |  whole pages: device ⇄ caller's memory  |  tail  |
         buffered               direct                     buffered

Direct I/O copies nothing, and is as fast whatever state the machine's free memory is in. A file system, or
memory that does not start on a page, may refuse it: the same bytes then go through the page cache.

Invariant: a page is written one way or the other, never both ways at once: there is nothing to reconcile.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from contextlib import ExitStack

__all__ = ["DirectFile"]

PAGE_BYTES = 4096  # a multiple of what disks ask for

_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)
# Its own generator: reading a checkpoint takes no random number from the program.
_random = random.Random(0)


class DirectFile:
    """An open file that is written or read at any offset, from any thread.

    Through the page cache, until :meth:`try_direct`.

    Args:
        fd: A descriptor of the file; closed with this.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._direct_fd = -1
        self._is_direct = False
        self._probes_cache = False

    def try_direct(self, path: str, flags: int, *, probes_cache: bool = False) -> None:
        """Use direct I/O for whole pages, as long as it is not refused.

        Args:
            path: Of the same file.
            flags: ``os.O_WRONLY`` or ``os.O_RDONLY``.
            probes_cache: Read from the page cache what is there.
        """
        try:
            self._direct_fd = os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as e:
            self._give_up_direct(e)
            return
        self._is_direct = True
        self._probes_cache = probes_cache
        if probes_cache:
            # Or a probe that finds nothing would start to read ahead what is then read directly.
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)

    def write_at(self, byte_offset: int, data: memoryview) -> None:
        """Write all of ``data``."""
        for start, stop, is_pages in _split(byte_offset, len(data)):
            if is_pages and self._is_direct:
                start += self._write_direct(byte_offset + start, data[start:stop])
            while start < stop:
                start += os.pwrite(self._fd, data[start:stop], byte_offset + start)

    def _write_direct(self, byte_offset: int, data: memoryview) -> int:
        """Write whole pages; return how many bytes were taken, fewer where direct I/O is refused."""
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._direct_fd, data[done:], byte_offset + done)
        except OSError as e:
            self._give_up_direct(e)
        return done

    def read_into(self, byte_offset: int, buffer: memoryview) -> int:
        """Fill ``buffer``; return its length, or how much of it was filled where the file ends before."""
        for start, stop, is_pages in _split(byte_offset, len(buffer)):
            first, last = byte_offset + start, byte_offset + stop
            if is_pages and self._is_direct and not self._is_cached(first, last):
                start += self._read_direct(first, buffer[start:stop])
            while start < stop:
                count = os.preadv(self._fd, [buffer[start:stop]], byte_offset + start)
                if count == 0:
                    return start
                start += count
        return len(buffer)

    def _read_direct(self, byte_offset: int, buffer: memoryview) -> int:
        """Read whole pages; return how many bytes came, fewer at the end or where direct I/O is refused."""
        done = 0
        try:
            while done < len(buffer):
                count = os.preadv(self._direct_fd, [buffer[done:]], byte_offset + done)
                if count == 0:
                    break
                done += count
        except OSError as e:
            self._give_up_direct(e)
        return done

    def _is_cached(self, start: int, stop: int) -> bool:
        """Tell whether the page cache holds these bytes, by one of them."""
        if not self._probes_cache:
            return False
        # Any page, another one each time: the probe itself brings a page into the cache.
        at = _random.randrange(start, stop)
        try:
            return os.preadv(self._fd, [bytearray(1)], at, os.RWF_NOWAIT) == 1
        except OSError:  # not cached, or the file system cannot tell
            return False

    def _give_up_direct(self, error: OSError) -> None:
        """Use the page cache from now on, where the error is a refusal."""
        if error.errno not in _REFUSED:
            raise error
        # Its descriptor stays open: another thread may be using it.
        self._is_direct = False

    def sync(self) -> None:
        """Make everything that was written durable, whichever way it went."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Close both descriptors; once more is fine."""
        self._is_direct = False
        fds, self._fd, self._direct_fd = (self._fd, self._direct_fd), -1, -1
        with ExitStack() as closing:  # the second one also where the first fails, as on a full NFS
            for fd in fds:
                if fd >= 0:
                    closing.callback(os.close, fd)


def _split(byte_offset: int, num_bytes: int) -> Iterator[tuple[int, int, bool]]:
    """Yield the parts of a range, relative to its start, and which of them is whole pages."""
    head = min(-byte_offset % PAGE_BYTES, num_bytes)
    tail = max(num_bytes - (byte_offset + num_bytes) % PAGE_BYTES, head)
    for start, stop, is_pages in ((0, head, False), (head, tail, True), (tail, num_bytes, False)):
        if start < stop:
            yield start, stop, is_pages
