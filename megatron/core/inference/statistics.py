"""What an engine has done and holds at a moment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Gauges and counters of an engine.

    ``running`` and ``waiting`` requests; ``cache_usage``: share of blocks that texts hold. All others count from the
    start: tokens of prompts read and generated, tokens of prompts looked up in the prefix cache and found there,
    requests that lost their blocks for a while, drafts proposed and accepted, steps and the tokens they computed.
    """

    running: int = 0
    waiting: int = 0
    cache_usage: float = 0.0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    steps: int = 0
    step_tokens: int = 0
