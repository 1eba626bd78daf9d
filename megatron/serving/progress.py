"""A request on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.serving.streams import Stream


@dataclass
class Progress:
    """One request on its way, with the times that metrics need (seconds, monotonic)."""

    stream: Stream
    arrived: float
    prompt_tokens: int
    first_token: float | None = None
    last_token: float = 0.0
    generated: int = 0
