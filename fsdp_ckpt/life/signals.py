"""Signals that ask a run to end: noted, for the training loop to act on between two steps.

Invariant: a handler does nothing but note; a second signal changes nothing; handlers that were there before
are back when the watch is closed.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType
from typing import Any

__all__ = ["SignalWatch"]

logger = logging.getLogger("fsdp_ckpt")

# What launchers and schedulers send: at the end, or some time before it.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class SignalWatch:
    """Notes that this process was asked to end.

    Handlers can be set in the main thread alone; made in another one, a watch hears only of notices.
    """

    def __init__(self) -> None:
        self.has_signal = False
        self._pid = os.getpid()
        self._previous: dict[int, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            logger.warning("not in the main thread: signals to end the run are not noticed")
            return
        for number in SIGNALS:
            # A handler that Python did not set could not be put back.
            if signal.getsignal(number) is not None:
                self._previous[number] = signal.signal(number, self._note)

    def notice(self) -> None:
        """Note a notice that came another way; any thread may call it."""
        self.has_signal = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._pid:
            self.has_signal = True
            return
        # A forked child is no rank: whoever ends it means it.
        signal.signal(number, self._previous.get(number, signal.SIG_DFL))
        os.kill(os.getpid(), number)

    def close(self) -> None:
        """Put the handlers back that were there before; closing twice is fine."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._note:  # else someone has set another one since
                signal.signal(number, previous)
        self._previous = {}
