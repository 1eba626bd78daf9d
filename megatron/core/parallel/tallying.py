"""Modules that count what they do in a step, and adjust themselves by the counts of all ranks."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Tallying(Protocol):
    """Reports numbers under ``tally_name`` to ``SideLosses.tally`` in each forward pass."""

    tally_name: str

    def learn(self, counts: Tensor) -> None:
        """Adjust itself by the counts of the whole global batch, after the step's update and before the next pass."""
        ...
