"""What the HTTP server's process and the engine's tell each other; pickled, on a pipe that nobody else has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.inference.request import Request, Update
from megatron.core.inference.statistics import Statistics


@dataclass(frozen=True)
class Submission:
    """Requests for the engine, without their ``constraint``: its parser can't travel, only the ``grammar`` it is
    compiled from.
    """

    requests: Sequence[Request]
    grammar: str | None = None


@dataclass(frozen=True)
class Abort:
    """Requests that nobody waits for any more."""

    request_ids: Sequence[str]


@dataclass(frozen=True)
class Report:
    """What the engine says after each step and, while it has no work or has failed, every half second or more often.

    ``statistics``: the engine's. ``step_tokens``: those of each step since the last report. ``failure``: why it can't
    answer any more.
    """

    updates: Sequence[Update]
    statistics: Statistics
    step_tokens: Sequence[int] = ()
    failure: str | None = None
