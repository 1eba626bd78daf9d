"""One line at the bottom of a terminal that says how far the run is and when it will be done; silent elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO


def duration(seconds: float) -> str:
    """``0:42``, ``12:05``, ``3:07:00`` or ``2d 04:00``."""
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02d}:{minute:02d}"
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def progress_text(
    *, iteration: int, train_iters: int, loss: float | None, tokens_per_second: float, seconds_left: float, width: int
) -> str:
    """The line, cut to ``width`` columns: a bar, the iteration, the loss, the speed and the time remaining."""
    share = iteration / max(1, train_iters)
    filled = int(20 * share)
    shown = "" if loss is None else f"  loss {loss:.4f}"
    text = (
        f"{'━' * filled}{'╌' * (20 - filled)} {iteration:,}/{train_iters:,} ({share:.0%}){shown}"
        f"  {tokens_per_second:,.0f} tokens/s  {duration(seconds_left)} left"
    )
    return text[: max(0, width - 1)]


class ProgressLine:
    """Redraws itself on standard error when that is a terminal; standard output, which is parsed, never sees it."""

    def __init__(
        self, *, stream: TextIO | None = None, enabled: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._enabled = enabled and self._stream.isatty()
        self._clock = clock
        self._last_drawn = float("-inf")
        self._on_screen = False

    def show(
        self, *, iteration: int, train_iters: int, loss: float | None, tokens_per_second: float, seconds_left: float
    ) -> None:
        """Draw the state of the run, at most ten times a second."""
        if not self._enabled or self._clock() - self._last_drawn < 0.1:
            return
        text = progress_text(
            iteration=iteration,
            train_iters=train_iters,
            loss=loss,
            tokens_per_second=tokens_per_second,
            seconds_left=seconds_left,
            width=shutil.get_terminal_size().columns,
        )
        self._stream.write(f"\r\x1b[K{text}")
        self._stream.flush()
        self._last_drawn, self._on_screen = self._clock(), True

    def clear(self) -> None:
        """Take the line off the screen, before something else is printed.

        It comes back a tenth of a second later at the earliest, when what is printed through a pipe has arrived too.
        """
        if self._on_screen:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._on_screen, self._last_drawn = False, self._clock()
