"""Rules over the settings of a run: small functions that return None or one sentence.

A sentence says what is wrong with the actual values, which flags are involved, and which values would work. All rules
run, and all failures are listed at once, before any process group or device is touched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence

from megatron.config.family import FamilyConfig, Rule
from megatron.config.rules import (
    context,
    inputs,
    layout,
    model,
    no_effect,
    pipeline,
    profiling,
    remarking,
    schedule,
    training,
)
from megatron.config.rules.known import UnknownSettingError, without
from megatron.config.run import RunConfig
from megatron.errors import ConfigError

RULES: tuple[Rule, ...] = (
    *layout.RULES,
    *context.RULES,
    *pipeline.RULES,
    *model.RULES,
    *training.RULES,
    *schedule.RULES,
    *inputs.RULES,
    *profiling.RULES,
)


def rules_of(run: RunConfig) -> tuple[Rule, ...]:
    """The rules of every run, and those of its family's and its command's settings."""
    return (*RULES, *(rule for group in run.groups() if isinstance(group, FamilyConfig) for rule in group.rules()))


def check(run: RunConfig) -> None:
    """Raise ConfigError with every failure of ``run``, if there is any."""
    problems = failures(run)
    if problems:
        raise ConfigError(listed(problems))


def failures(run: RunConfig, *, faulted: Collection[str] = ()) -> list[str]:
    """One sentence per failure: numbers out of bounds first, and then what the rules find.

    A rule that reads a number out of bounds, one of the ``faulted`` flags (already reported), or a value derived from
    them is skipped: its finding may disappear once those are right.
    """
    problems, wrong = [], set(faulted)
    for spec in run.flags():
        sentence = spec.out_of_bounds(run.value(spec))
        if sentence is None:
            continue
        if run.given(spec.field) or not (spec.options.derived and run.provenance):
            problems.append(sentence)
        wrong.add(spec.positive)
    known = without(run, _unknown_fields(run, wrong)) if wrong else run
    for rule in rules_of(run):
        with contextlib.suppress(UnknownSettingError):
            if sentence := rule(known):
                problems.append(sentence)
    return problems


def _unknown_fields(run: RunConfig, wrong: Collection[str]) -> set[str]:
    """Fields of the ``wrong`` flags, and fields derived from them that were not given."""
    fields = {spec.field for spec in run.flags() if spec.positive in wrong}
    fields |= {"world_size"} if "--world-size" in wrong else set()
    follow = {s.field for s in run.flags() if fields & set(s.options.follows) and not run.given(s.field)}
    return fields | follow


def remarks(run: RunConfig) -> list[str]:
    """Remarks about valid settings that have no effect or an unexpected one."""
    unused = [f"{', '.join(flags)}: no effect{reason}" for flags, reason in no_effect.without_effect(run)]
    return unused + [sentence for rule in (*remarking.RULES, *run.family.remarks()) if (sentence := rule(run))]


def listed(problems: Sequence[str], *, of: str = "settings") -> str:
    """The message of an error: the sentence, or a numbered list when there are several."""
    if len(problems) == 1:
        return problems[0]
    lines = (f"  {number}. {problem}" for number, problem in enumerate(problems, start=1))
    return f"{len(problems)} problems in the {of}:\n" + "\n".join(lines)
