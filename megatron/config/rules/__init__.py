"""Rules over the settings of a run: small functions that return None or one sentence.

A sentence says what is wrong with the actual values, which flags, and what would fit. All rules run, and all failures
are listed at once, before any process group or device is touched.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Sequence

from megatron.config.flags import FlagSpec, group_name
from megatron.config.rules import (
    bert,
    context,
    fine_tuning,
    inputs,
    layout,
    model,
    pipeline,
    remarking,
    schedule,
    sentences,
    t5,
    task,
    training,
)
from megatron.config.run import CORE_GROUPS, RunConfig
from megatron.errors import ConfigError

Rule = Callable[[RunConfig], "str | None"]

RULES: tuple[Rule, ...] = (
    *layout.RULES,
    *context.RULES,
    *pipeline.RULES,
    *model.RULES,
    *training.RULES,
    *schedule.RULES,
    *inputs.RULES,
    *sentences.RULES,
    *bert.RULES,
    *t5.RULES,
    *task.RULES,
    *fine_tuning.RULES,
)


def check(run: RunConfig) -> None:
    """Raise ConfigError with every failure of ``run``, if there is any."""
    problems = failures(run)
    if problems:
        raise ConfigError(listed(problems))


def failures(run: RunConfig, *, faulted: Collection[str] = ()) -> list[str]:
    """One sentence per failure; rules that speak of ``faulted`` flags, already reported, are left out.

    Numbers out of bounds are reported first and replaced by the nearest sound ones, so that the other rules still run.
    """
    problems, wrong, fixed = [], set(faulted), run
    for spec in run.flags():
        sentence = spec.out_of_bounds(run.value(spec))
        if sentence is None:
            continue
        fixed = _with_stand_in(fixed, spec)
        if not spec.options.derived or run.given(spec.field) or not run.provenance:
            problems.append(sentence)
        wrong.add(spec.positive)
    mentions_wrong = re.compile("|".join(rf"{re.escape(flag)}(?![\w-])" for flag in sorted(wrong))) if wrong else None
    for rule in RULES:
        sentence = rule(fixed)
        if sentence and not (mentions_wrong and mentions_wrong.search(sentence)):
            problems.append(sentence)
    return problems


def remarks(run: RunConfig) -> list[str]:
    """What a user should know about settings that are sound but have no effect, or another one than it seems."""
    return [sentence for rule in remarking.RULES if (sentence := rule(run))]


def listed(problems: Sequence[str], *, of: str = "settings") -> str:
    """The message of an error: the sentence, or a numbered list when there are several."""
    if len(problems) == 1:
        return problems[0]
    lines = (f"  {number}. {problem}" for number, problem in enumerate(problems, start=1))
    return f"{len(problems)} things are wrong with the {of}:\n" + "\n".join(lines)


def _with_stand_in(run: RunConfig, spec: FlagSpec) -> RunConfig:
    """The run with the flag's default or smallest sound value; groups of recipes are left as they are."""
    if spec.group not in {group_name(kind) for kind in CORE_GROUPS}:
        return run
    value = spec.stand_in()
    group = dataclasses.replace(getattr(run, spec.group), **{spec.field: value})
    return dataclasses.replace(run, **{spec.group: group})
