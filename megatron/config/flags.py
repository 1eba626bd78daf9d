"""A dataclass field that is also a command-line flag.

``flag()`` declares one; its name, type, choices and number of values come from the field, and its help is mandatory.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal, TypeVar

from megatron.errors import ConfigError

_KEY = "megatron.flag"
_Group = TypeVar("_Group")
Number = float


def flag(
    help: str,
    *,
    default: Any = dataclasses.MISSING,
    name: str | None = None,
    aliases: Sequence[str] = (),
    off: str | None = None,
    derived: str | None = None,
    renamed_values: Mapping[str, tuple[str, str]] | None = None,
    at_least: Number | None = None,
    above: Number | None = None,
    at_most: Number | None = None,
    below: Number | None = None,
    architecture: bool = False,
) -> Any:
    """Declare a dataclass field that is a flag; without ``default`` the flag is required.

    ``name``: spelling when it is not ``--kebab-case`` of the field. ``aliases``: further spellings that are accepted.
    ``off``: the flag that turns a boolean off whose default is True.
    ``derived``: says what the value becomes when it is not given (``default`` is then None and the annotation plain).
    ``renamed_values``: values of Megatron-LM's that mean another value here, each with the word printed about it.
    ``at_least``, ``above``, ``at_most``, ``below``: bounds of each number.
    ``architecture``: the field is part of what a checkpoint's weights mean; ``--use-checkpoint-args`` takes it.
    """
    options = _Options(
        help,
        name,
        tuple(aliases),
        off,
        derived,
        dict(renamed_values or {}),
        at_least,
        above,
        at_most,
        below,
        architecture,
    )
    return dataclasses.field(default=default, metadata={_KEY: options})


@dataclass(frozen=True)
class _Options:
    """What ``flag()`` was told, kept in the field's metadata."""

    help: str
    name: str | None
    aliases: tuple[str, ...]
    off: str | None
    derived: str | None
    renamed_values: dict[str, tuple[str, str]]
    at_least: Number | None
    above: Number | None
    at_most: Number | None
    below: Number | None
    architecture: bool


@dataclass(frozen=True)
class FlagSpec:
    """One flag as the parser, the help text and the reference see it."""

    group: str
    field: str
    options: _Options
    kind: type
    choices: tuple[Any, ...]
    count: int | None
    is_list: bool
    default: Any

    @cached_property
    def spelling(self) -> str:
        """The spelling shown to users; for a boolean that is on by default, the one that turns it off."""
        return self.options.off or self.positive

    @cached_property
    def positive(self) -> str:
        """The spelling that sets the field to the value that follows, or to True."""
        return self.options.name or "--" + self.field.replace("_", "-")

    @property
    def is_switch(self) -> bool:
        """Whether the flag stands alone, without a value."""
        return self.kind is bool

    @property
    def required(self) -> bool:
        """Whether the field has no default."""
        return self.default is dataclasses.MISSING

    def spellings(self) -> dict[str, bool | None]:
        """Every accepted spelling, with the value a switch sets (None for a flag that takes values)."""
        value = True if self.is_switch else None
        found: dict[str, bool | None] = dict.fromkeys((self.positive, *self.options.aliases), value)
        if self.is_switch:
            found[self.options.off or "--no-" + self.positive[2:]] = False
        return found

    def convert(self, raw: Any) -> Any:
        """The field's value from command-line words or from a file's value; raises ConfigError with the reason."""
        if self.is_switch:
            if isinstance(raw, bool):
                return raw
            raise ConfigError(f"{self.positive} is on or off, so it takes no value, not {raw!r}.")
        values = list(raw) if isinstance(raw, (list, tuple)) else [raw]
        if not self.is_list:
            if len(values) != 1:
                raise ConfigError(f"{self.positive} takes one value, not {len(values)}: {' '.join(map(str, values))}.")
            return self._convert_one(values[0])
        if self.count is not None and len(values) != self.count:
            raise ConfigError(
                f"{self.positive} takes {self.count} values, not {len(values)}: {' '.join(map(str, values))}."
            )
        return tuple(self._convert_one(value) for value in values)

    def _convert_one(self, raw: Any) -> Any:
        if isinstance(raw, (bool, list, dict)) or raw is None:
            raise ConfigError(f"{self.positive} is {_NOUNS[self.kind]}, not {raw!r}.")
        text = str(raw).strip()
        if text in self.options.renamed_values:
            text = self.options.renamed_values[text][0]
        try:
            value = self.kind(text)
        except ValueError:
            raise ConfigError(f"{self.positive} is {_NOUNS[self.kind]}, not {text!r}.") from None
        if self.choices and value not in self.choices:
            raise ConfigError(
                f"{self.positive} cannot be {text!r}; choose {one_of(self.choices)}{did_you_mean(text, self.choices)}."
            )
        return value

    def out_of_bounds(self, value: Any) -> str | None:
        """One sentence when a number lies outside the flag's bounds."""
        limits = self.options
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, (bool, str)) or number is None:
                continue
            if number != number:
                return f"{self.positive} is nan; give a number."
            if limits.at_least is not None and number < limits.at_least:
                return f"{self.positive} is {number}; it must be at least {limits.at_least}."
            if limits.above is not None and number <= limits.above:
                return f"{self.positive} is {number}; it must be more than {limits.above}."
            if limits.at_most is not None and number > limits.at_most:
                return f"{self.positive} is {number}; it must be at most {limits.at_most}."
            if limits.below is not None and number >= limits.below:
                return f"{self.positive} is {number}; it must be less than {limits.below}."
        return None


_NOUNS: dict[type, str] = {int: "a whole number", float: "a number", str: "a word", bool: "on or off"}


def one_of(values: Iterable[Any]) -> str:
    """``a, b or c``."""
    *most, last = [str(value) for value in values]
    return f"{', '.join(most)} or {last}" if most else last


def did_you_mean(word: str, known: Iterable[Any]) -> str:
    """``; did you mean X?`` for the nearest known word, else nothing."""
    near = difflib.get_close_matches(word, [str(each) for each in known], n=1, cutoff=0.7)
    return f" (did you mean {near[0]}?)" if near else ""


@cache
def flags_of(group: Hashable) -> tuple[FlagSpec, ...]:
    """Every flag of a group, in the order of its fields; a field without help is a programming error."""
    assert isinstance(group, type)
    hints = typing.get_type_hints(group)
    return tuple(_spec(group, field, hints[field.name]) for field in dataclasses.fields(group))


def group_name(group: type) -> str:
    """Name of a group in files and reports: ``ModelConfig`` -> ``model``."""
    return group.__name__.removesuffix("Config").lower()


def _spec(group: type, field: dataclasses.Field[Any], hint: Any) -> FlagSpec:
    options = field.metadata.get(_KEY)
    where = f"{group.__name__}.{field.name}"
    if not isinstance(options, _Options) or not options.help.strip():
        raise TypeError(f"{where} needs flag(help): every setting says what it does")
    kind, choices, count, is_list = _read_type(hint, where)
    if kind is bool and field.default is True and options.off is None:
        raise TypeError(f"{where} is on by default, so it must name the flag that turns it off")
    return FlagSpec(group_name(group), field.name, options, kind, choices, count, is_list, field.default)


def _read_type(hint: Any, where: str) -> tuple[type, tuple[Any, ...], int | None, bool]:
    """(element type, choices, number of values, whether a tuple) of an annotation."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        (inner,) = [each for each in arguments if each is not type(None)]
        return _read_type(inner, where)
    if origin is tuple:
        kind, choices, _, _ = _read_type(arguments[0], where)
        return kind, choices, None if arguments[1] is Ellipsis else len(arguments), True
    if origin is Literal:
        return type(arguments[0]), arguments, None, False
    if hint not in _NOUNS:
        raise TypeError(f"{where}: a flag cannot be of type {hint!r}")
    return hint, (), None, False


def check_flags(cls: type[_Group]) -> type[_Group]:
    """Class decorator that reads a group's flags at import, so that a field without help never reaches a user."""
    flags_of(cls)
    return cls


def derive(group: object, field: str, value: Any) -> None:
    """Fill in a field that was not given; for ``__post_init__`` of a frozen group."""
    if getattr(group, field) is None:
        object.__setattr__(group, field, value)
