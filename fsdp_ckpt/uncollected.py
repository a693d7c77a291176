"""Work that no garbage collection interrupts.

Python's cyclic collector runs wherever objects are made. In a training process a full collection looks at
millions of them, and takes longer than the copy of a snapshot; all ranks wait for the one that it hits.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["uncollected"]

_lock = threading.Lock()
_num_inside = 0
_was_enabled = False


@contextmanager
def uncollected() -> Iterator[None]:
    """Put cyclic collections off until this is over; also by several threads at once.

    Where the program has turned them off itself, they stay off.
    """
    global _num_inside, _was_enabled
    with _lock:
        _num_inside += 1
        if _num_inside == 1:
            _was_enabled = gc.isenabled()
            gc.disable()
    try:
        yield
    finally:
        with _lock:
            _num_inside -= 1
            if _num_inside == 0 and _was_enabled:
                gc.enable()
