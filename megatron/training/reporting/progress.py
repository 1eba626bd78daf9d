"""The progress bar of all commands: on a terminal only, with the time left."""

from __future__ import annotations

import sys
import threading
import time
from typing import TextIO

from tqdm import tqdm

_SECONDS_BETWEEN_DRAWS = 0.1


class _Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
    """tqdm without its monitoring thread and its lock between processes: data loaders fork."""

    monitor_interval = 0


_Bar.set_lock(threading.RLock())


class ProgressBar:
    """tqdm's bar on standard error where that is a terminal; it is never drawn on standard output, which is parsed.

    ``total``: amount of work, None when unknown. ``initial``: amount done before, which does not count for the speed.
    ``counted``: show the amounts too, not only percent. ``stream``: instead of standard error.
    """

    def __init__(
        self,
        total: float | None,
        *,
        initial: float = 0,
        counted: bool = True,
        stream: TextIO | None = None,
        enabled: bool = True,
    ) -> None:
        count = "{n:,}/{total:,} ({percentage:.0f}%)" if counted else "{percentage:.0f}%"
        self._bar = _Bar(
            total=total,
            initial=initial,
            smoothing=0.1,  # weight of the latest speed in the time remaining
            file=sys.stderr if stream is None else stream,
            disable=None if enabled else True,  # None: where the stream is no terminal
            bar_format=f"{{bar:20}} {count}  {{desc}}  {{remaining}} left" if total else "{desc}",
            ascii="╌━",
            dynamic_ncols=True,
            mininterval=_SECONDS_BETWEEN_DRAWS,
            miniters=0,
            delay=_SECONDS_BETWEEN_DRAWS / 2,  # nothing is drawn before there is something to show
            position=0,
            leave=False,
        )
        self._total, self._initial = total, initial
        self._start, self._cleared_at = time.monotonic(), float("-inf")

    @property
    def enabled(self) -> bool:
        """Whether anything is drawn."""
        return not self._bar.disable

    def show(self, done: float, *facts: str) -> None:
        """Draw the bar with the amount ``done`` and ``facts``, at most ten times a second."""
        self._bar.set_description_str("  ".join(facts), refresh=False)
        if time.monotonic() - self._cleared_at < _SECONDS_BETWEEN_DRAWS:
            self._bar.n = done
        else:
            self._bar.update(done - self._bar.n)

    def clear(self) -> None:
        """Erase the bar before something else is printed.

        It is redrawn a tenth of a second later at the earliest, so that text printed through a pipe arrives before it.
        """
        if self.enabled:
            self._bar.clear()
            self._cleared_at = time.monotonic()

    def leave_out(self, seconds: float) -> None:
        """Leave the last ``seconds``, spent on something else, out of the speed."""
        if self.enabled:
            self._bar.start_t += seconds
            self._bar.last_print_t += seconds

    def time_left(self, done: float) -> str:
        """The time left at the mean speed so far, for a log where no bar is drawn; empty when unknown."""
        if not self._total or done <= self._initial:
            return ""
        rate = (done - self._initial) / (time.monotonic() - self._start)
        return f"{tqdm.format_interval((self._total - done) / rate)} left"
