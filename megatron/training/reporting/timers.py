"""Named wall-clock timers at three levels of detail, and their report over ranks in Megatron's format."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

TimingOption = Literal["minmax", "max", "all"]
During = Callable[[str], AbstractContextManager[None]]
"""What is entered with the name of a part of the run while that lasts."""


class Timers:
    """Accumulates seconds by name.

    ``level``: the finest that is measured: 0 evaluation and saving, 1 parts of a step, 2 single operations.
    ``synchronize``: waits for the device before the clock is read. ``barrier``: waits for all ranks before a level-1
    timer starts, so that it doesn't include waiting for them. ``during``: entered with the name of every timer,
    measured or not; it records the rank's activity.
    """

    def __init__(
        self,
        *,
        level: int = 0,
        synchronize: Callable[[], None] | None = None,
        barrier: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        during: During = lambda name: nullcontext(),
    ) -> None:
        self.level = level
        self._synchronize = synchronize
        self._barrier = barrier
        self._clock = clock
        self._during = during
        self._seconds: dict[str, float] = {}

    def surround(self, around: Callable[[During], During]) -> None:
        """Enter ``around(during)`` from now on where ``during`` was entered."""
        self._during = around(self._during)

    def __call__(self, name: str, *, level: int) -> AbstractContextManager[None]:
        """``with timers("forward-backward", level=1): …`` adds the block's time to ``name``."""
        return self._measure(name, level) if level <= self.level else self._during(name)

    @contextmanager
    def _measure(self, name: str, level: int) -> Iterator[None]:
        if level == 1 and self._barrier is not None:
            self._barrier()
        start = self._now()
        try:
            with self._during(name):
                yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - start

    def _now(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        return self._clock()

    def take(self, *names: str) -> dict[str, float]:
        """Seconds by name, of ``names`` or of all timers; they restart from zero."""
        chosen = names or tuple(self._seconds)
        return {name: self._seconds.pop(name) for name in chosen if name in self._seconds}


def timer_report(per_rank: Sequence[Mapping[str, float]], *, option: TimingOption, iterations: int = 1) -> str:
    """Times of every rank as text, in milliseconds per iteration; empty when no timer ran on any rank.

    A timer's minimum and maximum are over the ranks on which it ran.
    """
    names = list(dict.fromkeys(name for seconds in per_rank for name in seconds))
    if not names:
        return ""
    header = {
        "minmax": "(min, max) time across ranks (ms):",
        "max": "max time across ranks (ms):",
        "all": "times across ranks (ms):",
    }
    lines = [header[option]]
    for name in names:
        by_rank = {rank: s[name] * 1000 / iterations for rank, s in enumerate(per_rank) if name in s}
        label = f"    {(name + ' ').ljust(48, '.')}:"
        if option == "minmax":
            lines.append(f"{label} ({min(by_rank.values()):.2f}, {max(by_rank.values()):.2f})")
        elif option == "max":
            lines.append(f"{label} {max(by_rank.values()):.2f}")
        else:
            lines.append(f"  {name}:")
            lines += [f"     rank {rank:2d}: {milliseconds:.2f}" for rank, milliseconds in by_rank.items()]
    return "\n".join(lines)


def longest(per_rank: Sequence[Mapping[str, float]], *, iterations: int = 1) -> dict[str, float]:
    """Seconds per iteration of the slowest rank, by timer."""
    slowest: dict[str, float] = {}
    for seconds in per_rank:
        for name, value in seconds.items():
            slowest[name] = max(slowest.get(name, 0.0), value / iterations)
    return slowest
