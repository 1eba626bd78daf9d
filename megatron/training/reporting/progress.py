"""One line at the bottom of a terminal that shows how far a command is and when it will be done; silent elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from typing import TextIO

from tqdm import tqdm

_SECONDS_BETWEEN_DRAWS = 0.1


class _Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
    """tqdm without its monitoring thread and its lock between processes, as processes fork."""

    monitor_interval = 0


_Bar.set_lock(threading.RLock())


class ProgressBar:
    """tqdm's bar on standard error if that is a terminal; standard output, which is parsed, never contains it.

    ``total``: work to do, None where unknown. ``initial``: work done before, which does not count for the speed.
    ``counted``: show numbers of the work, not only percent.
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
        self._cleared_at = float("-inf")

    @property
    def enabled(self) -> bool:
        """Whether anything is drawn."""
        return not self._bar.disable

    def show(self, done: float, *facts: str) -> None:
        """Draw how much work is done in all, with ``facts``, at most ten times a second."""
        self._bar.set_description_str("  ".join(facts), refresh=False)
        if time.monotonic() - self._cleared_at < _SECONDS_BETWEEN_DRAWS:
            self._bar.n = done
        else:
            self._bar.update(done - self._bar.n)

    def clear(self) -> None:
        """Take the line off the screen, before something else is printed.

        It comes back a tenth of a second later at the earliest, when what is printed through a pipe has arrived too.
        """
        if self.enabled:
            self._bar.clear()
            self._cleared_at = time.monotonic()

    def leave_out(self, seconds: float) -> None:
        """Do not count the last ``seconds``, in which something else was done, for the speed."""
        if self.enabled:
            self._bar.start_t += seconds
            self._bar.last_print_t += seconds
