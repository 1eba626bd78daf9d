"""What a rank is doing at this moment, for reports of stalls and failures."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType


@dataclass
class Activity:
    """What a rank is doing: written by the rank's main thread, read by the thread that watches it.

    ``progress``: e.g. ``iteration 12``. ``part``: of that iteration, e.g. ``forward-backward``. ``action``: of the
    pipeline runner. ``collective``: in which the rank waits for the world ranks ``group``; empty outside of
    one. ``since``: monotonic time at which it began. ``steps``: iterations done by this process. ``waited``: seconds
    that this process has been in collectives, altogether.
    """

    progress: str = "start"
    part: str = ""
    action: str = ""
    collective: str = ""
    group: tuple[int, ...] = ()
    since: float = 0.0
    steps: int = 0
    waited: float = 0.0

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Set ``part`` for a ``with`` block; it stays set after an exception."""
        before, self.part = self.part, part
        yield
        self.part = before

    def waiting(self, collective: str, group: Sequence[int]) -> _Waiting:
        """Set ``collective``, e.g. ``all-reduce over dp, cp``, and ``group`` for a ``with`` block.

        They stay set after an exception, for the report of where the rank failed.
        """
        return _Waiting(self, collective, group)

    @property
    def seconds_waited(self) -> float:
        """How long the rank has been in its collective; 0 outside of one."""
        return time.monotonic() - self.since if self.collective else 0.0

    @property
    def place(self) -> str:
        """The place in the run in words, without the collective."""
        return ", ".join(filter(None, (self.progress, self.part, self.action)))


class _Waiting:
    """A class and not a generator: it is entered hundreds of times a step."""

    __slots__ = ("_activity", "_around", "_collective", "_group", "_start")

    def __init__(self, activity: Activity, collective: str, group: Sequence[int]) -> None:
        self._activity, self._collective, self._group = activity, collective, group

    def __enter__(self) -> None:
        activity = self._activity
        self._around = (activity.collective, activity.group)
        activity.since = self._start = time.monotonic()
        activity.group = tuple(self._group)
        activity.collective = self._collective  # last: the watching thread may look at any time

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            activity = self._activity
            activity.collective, activity.group = self._around
            if not activity.collective:  # else the time is part of that of the one around it
                activity.waited += time.monotonic() - self._start
