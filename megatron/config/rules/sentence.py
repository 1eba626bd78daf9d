"""Rules that are a sentence and a condition."""

from __future__ import annotations

from collections.abc import Callable

from megatron.config.family import Rule
from megatron.config.run import RunConfig


def rule(sentence: str, when: Callable[[RunConfig], object]) -> Rule:
    """The rule that returns ``sentence`` where ``when(run)`` holds; ``{run.optimizer.lr}`` stands for that setting."""
    return lambda run: sentence.format(run=run) if when(run) else None
