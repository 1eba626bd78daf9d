"""One line at the bottom of a terminal that says how far a command is and when it will be done; silent elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO


def duration(seconds: float) -> str:
    """``0:42``, ``12:05``, ``3:07:00`` or ``2d 04:00``."""
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02d}:{minute:02d}"
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


@dataclass(frozen=True)
class Work:
    """What is done of what there is to do. ``total``: None where that isn't known."""

    done: float
    total: float | None

    @property
    def share(self) -> float:
        """Between 0 and 1."""
        return min(self.done / max(1, self.total), 1.0) if self.total else 0.0

    def seconds_left(self, seconds: float) -> float:
        """Time remaining, when what is done took ``seconds``."""
        return seconds * max((self.total or 0) - self.done, 0) / self.done if self.done else 0.0


def progress_text(work: Work, *facts: str, seconds_left: float, width: int, counted: bool = True) -> str:
    """The line, cut to ``width`` columns: a bar, what is done (if ``counted``), ``facts`` and the time remaining."""
    shown = list(facts)
    if work.total:
        filled = int(20 * work.share)
        count = f"{work.done:,}/{work.total:,} ({work.share:.0%})" if counted else f"{work.share:.0%}"
        shown = [f"{'━' * filled}{'╌' * (20 - filled)} {count}", *facts, f"{duration(seconds_left)} left"]
    return "  ".join(shown)[: max(0, width - 1)]


class ProgressLine:
    """Redraws itself on standard error when that is a terminal; standard output, which is parsed, never sees it."""

    def __init__(
        self, *, stream: TextIO | None = None, enabled: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self.enabled = enabled and self._stream.isatty()
        self._clock = clock
        self._last_drawn = float("-inf")
        self._on_screen = False

    def show(self, work: Work, *facts: str, seconds_left: float, counted: bool = True) -> None:
        """Draw how far the work is, at most ten times a second."""
        if not self.enabled or self._clock() - self._last_drawn < 0.1:
            return
        width = shutil.get_terminal_size().columns
        text = progress_text(work, *facts, seconds_left=seconds_left, width=width, counted=counted)
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
