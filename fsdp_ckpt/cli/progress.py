"""How far a long command is, on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from fsdp_ckpt.cli.terminal import console_of, is_terminal
from fsdp_ckpt.cli.text import bytes_text

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["ProgressLine", "duration_text"]

REDRAW_S = 0.2
PLAIN_S = 10.0
BAR_WIDTH = 24


class ProgressLine:
    """Shows bytes, rate and time left.

    Args:
        stream: Where to; by default stderr.
        clock: Seconds that never go back.
    """

    def __init__(
        self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream or sys.stderr
        self._clock = clock
        self._is_terminal = is_terminal(self._stream)
        self._start_s: float | None = None
        self._start_bytes = 0
        self._shown_s = 0.0
        self._bar: Progress | None = None

    def show(self, done_bytes: int, total_bytes: int) -> None:
        """Note how far the command is, the first time before it has done anything; one thread at a time."""
        now = self._clock()
        if self._start_s is None:
            # What was there before says nothing about the rate.
            self._start_s, self._start_bytes, self._shown_s = now, done_bytes, now
            return
        if now - self._shown_s < (REDRAW_S if self._is_terminal else PLAIN_S):
            return
        self._shown_s = now
        rate = (done_bytes - self._start_bytes) / max(now - self._start_s, 1e-9)
        left = duration_text((total_bytes - done_bytes) / rate) if rate else "?"
        text = (
            f"{done_bytes / max(total_bytes, 1):4.0%}  {bytes_text(done_bytes)} of "
            f"{bytes_text(total_bytes)}, {bytes_text(int(rate))}/s, {left} left"
        )
        if self._is_terminal:
            self._draw(done_bytes, total_bytes, text)
        else:
            print(text.strip(), file=self._stream, flush=True)

    def _draw(self, done_bytes: int, total_bytes: int, text: str) -> None:
        if self._bar is None:
            self._bar = _make_bar(self._stream)
            self._bar.add_task("", completed=done_bytes, total=total_bytes, text=text)
            self._bar.start()
            return
        task = self._bar.task_ids[0]
        self._bar.update(task, completed=done_bytes, total=total_bytes, text=text, refresh=True)

    def close(self) -> None:
        """Clear the line of a terminal: what comes next stands alone."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _make_bar(stream: TextIO) -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn

    return Progress(
        BarColumn(BAR_WIDTH),
        TextColumn("{task.fields[text]}", markup=False),
        console=console_of(stream),
        # No thread of its own: it is drawn where the command says how far it is.
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def duration_text(seconds: float) -> str:
    """Return ``12 s``, ``3 min 5 s`` or ``2 h 10 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
