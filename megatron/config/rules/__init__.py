"""Rules over the settings of a run: small functions that return None or one sentence.

A sentence says what is wrong with the actual values, which flags are involved, and which values would work. All rules
run, and all failures are listed at once, before any process group or device is touched.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from megatron.config.family import CheckedSettings, Rule
from megatron.config.rules import (
    context,
    diloco,
    fp8,
    guards,
    inputs,
    layout,
    model,
    mup,
    pipeline,
    positions,
    profiling,
    remarking,
    schedule,
    storage,
    training,
    zero,
)
from megatron.config.run import RunConfig
from megatron.errors import ConfigError

RULES: tuple[Rule, ...] = (
    *layout.RULES,
    *zero.RULES,
    *context.RULES,
    *pipeline.RULES,
    *model.RULES,
    *mup.RULES,
    *positions.RULES,
    *training.RULES,
    *fp8.RULES,
    *diloco.RULES,
    *schedule.RULES,
    *guards.RULES,
    *inputs.RULES,
    *storage.RULES,
    *profiling.RULES,
)


_Settings = TypeVar("_Settings")


def rules_of(run: RunConfig) -> tuple[Rule, ...]:
    """The rules of every run, and those of its family, of the parts of its model, and of its command.

    Rules about a part come from its settings, such as ``MoEConfig.rules``.
    """
    return (*RULES, *(rule for group in _own_groups(run) for rule in group.rules()))


def _own_groups(run: RunConfig) -> list[CheckedSettings]:
    """Settings of the run's family, of parts of its model, and of its command."""
    return [group for group in run.groups() if isinstance(group, CheckedSettings)]


def check(run: RunConfig) -> None:
    """Raise ConfigError with every failure of ``run``, if there is any."""
    problems = failures(run)
    if problems:
        raise ConfigError(listed(problems))


def failures(run: RunConfig, *, faulted: Collection[str] = ()) -> list[str]:
    """One sentence per failure: numbers out of bounds first, and then what the rules find.

    A rule that reads a number out of bounds, one of the ``faulted`` flags (already reported), or a value derived from
    them is skipped: its finding may disappear once those are right. A derived value out of bounds is reported where
    nothing says which given value it comes from.
    """
    problems, derived, wrong = [], {}, set(faulted)
    for spec in run.flags():
        if sentence := spec.out_of_bounds(run.value(spec)):
            if run.given(spec.field) or not (spec.options.derived and run.provenance):
                problems.append(sentence)
                wrong.add(spec.positive)
            else:
                derived[spec.field] = sentence
    # Fields of the wrong flags, and fields derived from them that were not given.
    unknown = {spec.field for spec in run.flags() if spec.positive in wrong}
    unknown |= {"world_size"} if "--world-size" in wrong else set()
    unknown |= {s.field for s in run.flags() if unknown & set(s.options.follows) and not run.given(s.field)}
    known = _without(run, unknown) if unknown else run
    for rule in rules_of(run):
        with contextlib.suppress(UnknownSettingError):
            if sentence := rule(known):
                problems.append(sentence)
    return problems or [sentence for field, sentence in derived.items() if field not in unknown]


class UnknownSettingError(Exception):
    """A rule read a setting that is not known, so its result is unknown."""


def _without(run: RunConfig, fields: Collection[str]) -> RunConfig:
    """A copy of ``run``: reading one of ``fields``, directly or in a property, raises UnknownSettingError."""
    hidden = {id(group): _hiding(group, fields, {}) for group in run.groups()}
    changed: dict[str, Any] = {name: hidden[id(value)] for name, value in vars(run).items() if id(value) in hidden}
    return _hiding(run, fields, changed | {"extra": tuple(hidden[id(each)] for each in run.extra)})


def _hiding(settings: _Settings, fields: Collection[str], changed: Mapping[str, Any]) -> _Settings:
    """``settings`` with ``changed`` values, nothing computed again, and ``fields`` hidden."""

    def read(self: object, name: str) -> Any:
        if name in fields:
            raise UnknownSettingError(name)
        return object.__getattribute__(self, name)

    kind = type(settings)
    hiding: _Settings = object.__new__(type(kind.__name__, (kind,), {"__getattribute__": read}))
    stored = {each.name for each in dataclasses.fields(kind)}  # type: ignore[arg-type]  # and no cached properties
    kept = {name: value for name, value in vars(settings).items() if name in stored}
    object.__getattribute__(hiding, "__dict__").update({**kept, **changed})
    return hiding


def remarks(run: RunConfig) -> list[str]:
    """Remarks about valid settings that have no effect or an unexpected one."""
    unused = [f"{', '.join(flags)}: no effect{reason}" for flags, reason in remarking.without_effect(run)]
    rules = (
        *remarking.RULES,
        *zero.REMARKS,
        *diloco.REMARKS,
        *(rule for group in _own_groups(run) for rule in group.remarks()),
    )
    return unused + [sentence for rule in rules if (sentence := rule(run))]


def listed(problems: Sequence[str], *, of: str = "settings") -> str:
    """The message of an error: the sentence, or a numbered list when there are several."""
    if len(problems) == 1:
        return problems[0]
    lines = (f"  {number}. {problem}" for number, problem in enumerate(problems, start=1))
    return f"{len(problems)} problems in the {of}:\n" + "\n".join(lines)
