"""Where the time of a run has gone since its first launch: steps that are kept, and what was lost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta

from typing_extensions import override

from megatron.training.reporting.events import Event


@dataclass(frozen=True)
class _Steps:
    """Steps between two log lines. ``last``: the iteration of the last one. ``seconds``: of all of them."""

    last: int
    count: int
    seconds: float


@dataclass
class Goodput:
    """Seconds of a run since its first launch, by what they were spent on.

    ``redone``: steps after the checkpoint from which training went on later. ``starting``: from the start of a process
    to its first step. ``away``: between the last event of a launch and the start of the next, with the steps
    that a kill kept from being logged.
    """

    launches: int = 0
    evaluating: float = 0.0
    saving: float = 0.0
    starting: float = 0.0
    redone: float = 0.0
    away: float = 0.0
    _kept: list[_Steps] = field(default_factory=list)
    _first: float | None = None
    _newest: float = 0.0

    @classmethod
    def of(cls, events: Iterable[Event]) -> Goodput:
        """The account of a run's events so far, in their order."""
        goodput = cls()
        for event in events:
            goodput.see(event)
        return goodput

    def see(self, event: Event) -> None:
        """Add an event."""
        fields = event.fields
        if event.name == "start":
            self._start(event.time, float(fields.get("setup_seconds", 0.0)))
            if fields.get("trains", True):
                self._redo_after(int(fields.get("iteration", 0)))
        elif event.name == "steps":
            steps = _Steps(int(fields["iteration"]), int(fields["iterations"]), float(fields["seconds"]))
            self._kept.append(steps)
        elif event.name == "rollback":
            self._redo_after(int(fields["iteration"]))
        elif event.name == "aside":
            if fields.get("what") in ("save-checkpoint", "save-hf"):
                self.saving += float(fields["seconds"])
            else:
                self.evaluating += float(fields["seconds"])
        self._newest = max(self._newest, event.time)

    def _start(self, now: float, setup: float) -> None:
        began = now - setup
        if self._first is None:
            self._first = began
        else:
            self.away += max(0.0, began - self._newest)
        self.launches += 1
        self.starting += setup

    def _redo_after(self, iteration: int) -> None:
        """Count the steps after ``iteration`` as done in vain."""
        while self._kept and self._kept[-1].last > iteration:
            steps = self._kept.pop()
            kept = max(0, steps.count - (steps.last - iteration))
            each = steps.seconds / max(1, steps.count)
            self.redone += each * (steps.count - kept)
            if kept:
                self._kept.append(_Steps(iteration, kept, each * kept))

    def close(self) -> None:
        """Do nothing: an account has no end."""

    @property
    def training(self) -> float:
        """Seconds of the steps whose result is kept."""
        return sum(steps.seconds for steps in self._kept)

    @property
    def total(self) -> float:
        """Seconds since the first launch began, up to the newest event."""
        return 0.0 if self._first is None else self._newest - self._first

    @property
    def share(self) -> float:
        """The share of the time since the first launch that went into steps whose result is kept, from 0 to 1."""
        return min(1.0, self.training / self.total) if self.total > 0 else 0.0

    def lost(self) -> dict[str, float]:
        """Seconds that were not spent on steps that are kept, by what they went into."""
        return {
            "steps done again": self.redone,
            "starting": self.starting,
            "saving": self.saving,
            "evaluating": self.evaluating,
            "away": self.away,
        }

    @override
    def __str__(self) -> str:
        """One line: since when, the share of kept steps, and what the rest went into."""
        shares = {what: seconds / self.total for what, seconds in self.lost().items()} if self.total > 0 else {}
        lost = ", ".join(f"{100 * share:.1f}% {what}" for what, share in shares.items() if share > 0)
        launches = f"{self.launches} launch{'es' if self.launches > 1 else ''}"
        return (
            f"{timedelta(seconds=round(self.total))} since the first of {launches}: goodput {100 * self.share:.1f}%"
            + (f"; lost: {lost}" if lost else "")
        )
