"""What a rank does in one step, as data: a schedule is a list of actions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Action:
    """Run one microbatch through one model chunk of this rank, forward (``F``) or backward (``B``)."""

    kind: Literal["F", "B"]
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.microbatch}"
