"""Flags of Megatron-LM and its forks that are no settings here: taken as another, ignored with a remark, or refused.

None is ignored silently: a flag that cannot have its effect says so, or stops the run when the effect would be missed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megatron.config.fork_flags import FORKS_IGNORED, FORKS_REFUSED
from megatron.config.ignored_flags import IGNORED
from megatron.config.recent_flags import RECENT_IGNORED, RECENT_REFUSED
from megatron.config.refused_flags import HARMLESS, REFUSED
from megatron.config.renamed_flags import BY_VALUE, RENAMED, SAME_VALUE
from megatron.config.suggestions import parts_of
from megatron.config.unavailable_flags import FAMILIES, UNAVAILABLE

Verdict = Literal["renamed", "ignored", "refused"]


@dataclass(frozen=True)
class LegacyFlag:
    """What becomes of a flag.

    ``word``: why it has no effect, or what to do instead. ``harmless``: values that ask for what happens anyway, taken
    without a remark. ``sets``: with ``renamed``, the fields that are meant and their values; None stands for the words
    that follow the flag. ``yields``: it counts only where the field itself is not given. ``values``: verdicts on
    single values, which go before the flag's own.
    """

    verdict: Verdict
    word: str = ""
    harmless: tuple[str, ...] = ()
    sets: Mapping[str, Any] = field(default_factory=dict)
    yields: bool = False
    values: Mapping[str, LegacyFlag] = field(default_factory=dict)


def legacy_flag(spelling: str) -> LegacyFlag | None:
    """What becomes of ``spelling``, if it is or was a flag of Megatron-LM or of a fork."""
    if spelling in LEGACY_FLAGS:
        return LEGACY_FLAGS[spelling]
    family = next((prefix for prefix in FAMILIES if spelling.startswith(prefix)), None)
    return LegacyFlag("refused", FAMILIES[family]) if family else None


def _tables() -> Iterator[tuple[str, LegacyFlag]]:
    """Every name without dashes, with its verdict."""
    for name, field_name in SAME_VALUE.items():
        yield name, LegacyFlag("renamed", sets={field_name: None})
    for name, renamed in RENAMED.items():
        yield name, LegacyFlag("renamed", renamed.word, sets=renamed.sets, yields=renamed.yields)
    for name, by_value in BY_VALUE.items():
        values = {value: LegacyFlag("renamed", sets=sets) for value, sets in by_value.meanings.items()}
        yield name, LegacyFlag("refused", by_value.refused, by_value.harmless, values=values)
    unavailable = ((names, f"{feature} not available{advice}") for feature, advice, names in UNAVAILABLE)
    verdicts: dict[Verdict, Iterable[tuple[str, str]]] = {
        "ignored": (*IGNORED, *RECENT_IGNORED, *FORKS_IGNORED),
        "refused": (*REFUSED, *RECENT_REFUSED, *FORKS_REFUSED, *unavailable),
    }
    for verdict, rows in verdicts.items():
        for names, word in rows:
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
# correct parts of flag names: a flag that has one in place of another is no misspelling
LEGACY_WORDS = frozenset(part for spelling in LEGACY_FLAGS for part in parts_of(spelling))
