"""Flags of Megatron-LM and its forks that are not settings here: renamed, ignored with a remark, or refused.

None is ignored silently: a flag that cannot have its effect says so, or stops the run when the effect would be missed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megatron.config.ignored_flags import IGNORED
from megatron.config.refused_flags import REFUSED
from megatron.config.renamed_flags import BY_VALUE, HARMLESS, RENAMED, SAME_VALUE
from megatron.config.suggestions import parts_of

Verdict = Literal["renamed", "ignored", "refused"]


@dataclass(frozen=True)
class LegacyFlag:
    """How a flag is treated.

    ``word``: why it has no effect, or what to do instead. ``harmless``: values that ask for the behaviour of this
    program, accepted without a remark. ``sets``: with ``renamed``, the fields that are meant and their values; None
    stands for the words that follow the flag. ``yields``: it applies only if the field itself is not given. ``values``:
    verdicts on single values; they take precedence over the flag's own.
    """

    verdict: Verdict
    word: str = ""
    harmless: tuple[str, ...] = ()
    sets: Mapping[str, Any] = field(default_factory=dict)
    yields: bool = False
    values: Mapping[str, LegacyFlag] = field(default_factory=dict)


def legacy_flag(spelling: str) -> LegacyFlag | None:
    """How ``spelling`` is treated, if it is or was a flag of Megatron-LM or of a fork."""
    families = (legacy for name, legacy in LEGACY_FLAGS.items() if name[-1] == "*" and spelling.startswith(name[:-1]))
    return LEGACY_FLAGS.get(spelling) or next(families, None)


def _tables() -> Iterator[tuple[str, LegacyFlag]]:
    """Every flag name without dashes, with its verdict; ``NAME*`` stands for all flags that start with NAME."""
    for name, field_name in SAME_VALUE.items():
        yield name, LegacyFlag("renamed", sets={field_name: None})
    for name, renamed in RENAMED.items():
        yield name, LegacyFlag("renamed", renamed.word, sets=renamed.sets, yields=renamed.yields)
    for name, by_value in BY_VALUE.items():
        values = {value: LegacyFlag("renamed", sets=sets) for value, sets in by_value.meanings.items()}
        yield name, LegacyFlag("refused", by_value.refused, by_value.harmless, values=values)
    verdicts: Mapping[Verdict, Mapping[str, str]] = {"ignored": IGNORED, "refused": REFUSED}
    for verdict, rows in verdicts.items():
        for word, names in rows.items():
            for name in names.split():
                yield name, LegacyFlag(verdict, word)


def _table() -> dict[str, LegacyFlag]:
    table: dict[str, LegacyFlag] = {}
    for name, legacy in _tables():
        spelling = f"--{name}"
        assert spelling not in table, f"two verdicts on {spelling}"
        harmless = legacy.harmless or HARMLESS.get(spelling, ())
        table[spelling] = replace(legacy, harmless=harmless)
    return table


LEGACY_FLAGS: dict[str, LegacyFlag] = _table()
# words that occur in flag names: none of them is treated as a misspelling of another
LEGACY_WORDS = frozenset(part for spelling in LEGACY_FLAGS for part in parts_of(spelling))
