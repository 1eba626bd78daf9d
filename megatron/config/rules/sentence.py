"""Rules that are a sentence and a condition, and the flags that sentences name."""

from __future__ import annotations

from collections.abc import Callable

from megatron.config.family import Rule
from megatron.config.flags import flags_of
from megatron.config.run import RunConfig


def rule(sentence: str, when: Callable[[RunConfig], object]) -> Rule:
    """The rule that returns ``sentence`` where ``when(run)`` holds; ``{run.optimizer.lr}`` stands for that setting."""

    def broken(run: RunConfig) -> str | None:
        return sentence.format(run=run) if when(run) else None

    broken.__doc__ = sentence
    return broken


def changed_flags(run: RunConfig, group: type, *, among: type | None = None) -> list[str]:
    """The flags of a group of settings that are given with another value than the default, as they were typed.
    ``among``: the base of the group that has them.
    """
    fields = {spec.field for spec in flags_of(among or group)}
    return [
        spec.typed(run.value(spec))
        for spec in flags_of(group)
        if spec.field in fields and run.given(spec.field) and run.value(spec) != spec.default
    ]
