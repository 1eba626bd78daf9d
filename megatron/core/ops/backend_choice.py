"""The backend that a registry has chosen, and why the preferred ones can't."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

B = TypeVar("B")


@dataclass(frozen=True)
class Choice(Generic[B]):
    """``backend`` computes; ``refused``: the reason of each preferred one."""

    name: str
    backend: B
    refused: dict[str, str] = field(default_factory=dict)

    def describe(self) -> str:
        """The choice for the start-up report, e.g. ``chunked (mamba-ssm refused: …)``."""
        reasons = "; ".join(f"{name} refused: {reason}" for name, reason in self.refused.items())
        return f"{self.name} ({reasons})" if reasons else self.name
