"""A dataclass field that is also a command-line flag.

``flag()`` declares one; its name, type, choices and number of values come from the field, and its help is mandatory.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from typing_extensions import override

from megatron.config.suggestions import did_you_mean
from megatron.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:
    _Made = TypeVar("_Made")

    def dataclass_transform(**_: bool) -> Callable[[_Made], _Made]:
        """What tells type checkers that subclasses are dataclasses; Python has it from 3.11 on."""
        return lambda made: made


_KEY = "megatron.flag"
SIZE, COUNT, REAL = 2**31 - 1, 2**53, 1e30
"""Largest value of a whole number unless its flag says otherwise; of one that counts samples, bytes or the like, which
JSON and 64-bit counters can hold; and of other numbers, whose squares and products are then finite."""
_MOST_SHOWN = 60  # characters of a wrong value in a message
_NOUNS: dict[type, str] = {int: "a whole number", float: "a number", str: "a word", bool: "on or off"}


@dataclass(frozen=True)
class FlagOptions:
    """The arguments of ``flag()``, kept in the field's metadata."""

    help: str
    name: str | None = None
    aliases: tuple[str, ...] = ()
    off: str | None = None
    derived: str | None = None
    follows: tuple[str, ...] = ()
    choices: tuple[Any, ...] = ()
    renamed_values: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    refused_values: Mapping[str, str] = field(default_factory=dict)
    short_forms: Mapping[str, str] = field(default_factory=dict)
    combined: Mapping[frozenset[str], str] = field(default_factory=dict)
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    architecture: bool = False
    from_checkpoint: bool = False
    internal: bool = False
    implies: Callable[[Any], Mapping[str, Any]] = lambda value: {}


def flag(help: str, *, default: Any = dataclasses.MISSING, **options: Any) -> Any:
    """Declare a dataclass field that is a flag; without ``default`` and ``derived`` the flag is required.

    ``name``: spelling when it is not ``--kebab-case`` of the field. ``aliases``: further spellings that are accepted.
    ``off``: see ``switch``.
    ``derived``: says what the value becomes when it is not given; the default is None, and the annotation plain.
    ``follows``: the fields that this derived value depends on.
    ``choices``: the only values, where the annotation can't list them.
    ``renamed_values``: values of Megatron-LM with another name here, each with the remark that is printed.
    ``refused_values``: values of Megatron-LM's that cannot be had, each with advice.
    ``short_forms``: flags without a value that stand for a choice. ``combined``: what two choices mean together.
    ``at_least``, ``above``, ``at_most``, ``below``: bounds of each number, which is between plus and minus ``SIZE``, or
    ``REAL`` for a fraction, if they say no other.
    ``architecture``: see ``architecture_flag``.
    ``from_checkpoint``: it may differ, but ``--use-checkpoint-args`` takes it, too.
    ``implies``: gives other fields, with the values that follow from this one's unless they are given.
    ``internal``: no flag after all, but a value that the run resolves and that is saved with the others.
    """
    if "derived" in options and default is dataclasses.MISSING:
        default = None
    return dataclasses.field(default=default, metadata={_KEY: FlagOptions(help, **options)})


def switch(help: str, *, off: str | None = None, **options: Any) -> Any:
    """Declare a boolean field, which is off by default; see ``flag``.

    ``off``: the field is on by default, and this flag, which ``help`` describes, turns it off.
    """
    return flag(help, default=off is not None, off=off, **options)


def architecture_flag(help: str, **options: Any) -> Any:
    """Declare a field that is part of what a checkpoint's weights mean, so that it must be the same on load."""
    return flag(help, architecture=True, **options)


def architecture_switch(help: str, **options: Any) -> Any:
    """A ``switch`` that is part of what a checkpoint's weights mean."""
    return switch(help, architecture=True, **options)


@dataclass(frozen=True)
class FlagSpec:
    """One flag as the parser, the help text and the reference see it.

    ``kind`` is the type of one value; ``count`` the number of values where ``is_list``, None for any number.
    """

    group: str
    field: str
    options: FlagOptions
    kind: type
    choices: tuple[Any, ...]
    count: int | None
    is_list: bool
    default: Any

    @cached_property
    def spelling(self) -> str:
        """The spelling shown in help; for a boolean that is on by default, the one that turns it off."""
        return self.options.off or self.positive

    @cached_property
    def positive(self) -> str:
        """The spelling that sets the field to the following value, or to True."""
        return self.options.name or flag_of(self.field)

    @property
    def is_switch(self) -> bool:
        """Whether the flag takes no value."""
        return self.kind is bool

    @property
    def required(self) -> bool:
        """Whether the field has no default."""
        return self.default is dataclasses.MISSING

    @property
    def noun(self) -> str:
        """The kind of value that the flag takes, in words."""
        noun = _NOUNS[self.kind] if not self.choices else f"one of {one_of(self.choices)}"
        if not self.is_list:
            return noun
        return f"{self.count or 'one or more'} values, each {noun}"

    def spellings(self) -> dict[str, bool | str | None]:
        """Every accepted spelling, with the value a switch sets (None for a flag that takes values)."""
        if self.options.internal:
            return {}
        value = True if self.is_switch else None
        found: dict[str, bool | str | None] = dict.fromkeys((self.positive, *self.options.aliases), value)
        found |= self.options.short_forms
        if self.is_switch:
            found[self.typed(False)] = False
        return found

    def typed(self, value: Any) -> str:
        """The flag with ``value``, as on a command line."""
        if isinstance(value, bool):
            return self.positive if value else self.options.off or "--no-" + self.positive[2:]
        return f"{self.positive} {words(value)}"

    def convert(self, raw: Any) -> Any:
        """The field's value from command-line words or from a file's value; raises ConfigError with the reason."""
        if self.is_switch:
            if isinstance(raw, bool):
                return raw
            given = words(raw) if isinstance(raw, list) else raw
            raise ConfigError(f"{self.positive} is on or off and takes no value, so {given!r} cannot follow it")
        values = list(raw) if isinstance(raw, (list, tuple)) else [raw]
        if self.is_list and self.kind is not str and len(values) == 1 and isinstance(values[0], str):
            values = values[0].split(",")
        expected = self.count if self.is_list else 1
        if not values or (expected is not None and len(values) != expected):
            given = f"{len(values)}: {words(values)}" if values else "none"
            if not values and self.kind is str and not self.choices:
                given += f"; write one that starts with a dash as {self.positive}=-…"
            raise ConfigError(
                f"{self.positive} takes {expected or 'one or more'} value{plural_s(expected)}, not {given}"
            )
        converted = tuple(self._convert_one(value) for value in values)
        return converted if self.is_list else converted[0]

    def restore(self, saved: Any, *, where: str) -> Any:
        """The field's value from its JSON form; raises ConfigError, which names the field in ``where``, for a value
        that the flag would not accept.
        """
        if saved is None:
            return None
        try:
            return self._accepted(saved)
        except ConfigError as error:
            raise ConfigError(f"{where}: {self.group}.{self.field}: {error}") from None

    def _accepted(self, saved: Any) -> Any:
        value = () if saved == [] and self.is_list and self.count is None else self.convert(saved)
        if wrong := self.out_of_bounds(value):
            raise ConfigError(wrong)
        return value

    def _convert_one(self, raw: Any) -> Any:
        if isinstance(raw, (bool, list, dict)) or raw is None:
            raise ConfigError(f"{self.positive} is {_NOUNS[self.kind]}, not {raw!r}")
        text = str(raw)
        if text in self.options.refused_values:
            raise ConfigError(f"{self.positive} {text}: {self.options.refused_values[text]}")
        text = self.options.renamed_values.get(text, (text, ""))[0]
        try:
            value = self.kind(text)
        except ValueError:
            raise ConfigError(f"{self.positive} is {_NOUNS[self.kind]}, not {abridged(text)!r}") from None
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{self.positive} is {value}; give a finite number")
        if self.choices and value not in self.choices:
            hint = did_you_mean(text, self.choices)
            raise ConfigError(f"{self.positive} cannot be {text!r}{hint}; choose {one_of(self.choices)}")
        return value

    def out_of_bounds(self, value: Any) -> str | None:
        """One sentence when a number lies outside the flag's bounds."""
        bounds, largest = self.options, SIZE if self.kind is int else REAL
        at_least = -largest if bounds.at_least is None and bounds.above is None else bounds.at_least
        at_most = largest if bounds.at_most is None and bounds.below is None else bounds.at_most
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, (bool, str)) or number is None:
                continue
            for limit, wrong, words in (
                (at_least, at_least is not None and number < at_least, "at least"),
                (bounds.above, bounds.above is not None and number <= bounds.above, "more than"),
                (at_most, at_most is not None and number > at_most, "at most"),
                (bounds.below, bounds.below is not None and number >= bounds.below, "less than"),
            ):
                if wrong:
                    return f"{self.positive} is {abridged(str(number))}; it must be {words} {limit:.12g}"
        return None

    def placeholder(self) -> Any:
        """A valid value in place of a missing or wrong one, so that other settings can still be checked."""
        if not self.required:
            return self.default
        value = self.choices[0] if self.choices else self.kind(1)
        return (value,) * (self.count or 1) if self.is_list else value


def flag_of(field: str) -> str:
    """The usual spelling of a field's flag: ``--num-layers`` of ``num_layers``."""
    return "--" + field.replace("_", "-")


def words(value: Any) -> str:
    """A setting's value as on a command line."""
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def abridged(text: str) -> str:
    """The text, or its beginning where it is long."""
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def one_of(values: Iterable[Any]) -> str:
    """``a, b or c``."""
    *most, last = [str(value) for value in values]
    return f"{', '.join(most)} or {last}" if most else last


def subject(flags: Sequence[str], one: str, more: str) -> str:
    """``--a and --b have``: the flags, and a verb in its form for ``one`` of them or for ``more``."""
    return f"{' and '.join(flags)} {one if len(flags) == 1 else more}"


def not_available(flags: Sequence[str], where: str) -> str:
    """``--a and --b are not available with …; leave them out``. ``where``: with or for what."""
    it = "it" if len(flags) == 1 else "them"
    return f"{subject(flags, 'is', 'are')} not available {where}; leave {it} out"


def plural_s(count: int | None) -> str:
    """The ending of a noun after ``count``: nothing for one."""
    return "" if count == 1 else "s"


_specs: dict[type, tuple[FlagSpec, ...]] = {}


def flags_of(group: type) -> tuple[FlagSpec, ...]:
    """Every flag of a group: its own in the order of its fields, then those of the groups that it is made of.

    A field without help is a programming error.
    """
    if group in _specs:
        return _specs[group]
    hints, fields = typing.get_type_hints(group), {each.name: each for each in dataclasses.fields(group)}
    own_first = dict.fromkeys(name for kind in group.__mro__ for name in vars(kind).get("__annotations__", ()))
    specs = []
    for name in own_first:
        if name not in fields:
            continue
        options, default, where = fields[name].metadata.get(_KEY), fields[name].default, f"{group.__name__}.{name}"
        if not isinstance(options, FlagOptions) or not options.help.strip():
            raise TypeError(f"{where} needs flag(help): every setting has a help text")
        kind, choices, count, is_list = _read_type(hints[name], where)
        if kind is bool and default is True and options.off is None:
            raise TypeError(f"{where} is on by default, so it must name the flag that turns it off")
        choices = options.choices or choices
        specs.append(FlagSpec(group_name(group), name, options, kind, choices, count, is_list, default))
    _specs[group] = tuple(specs)
    return _specs[group]


def changed(group: object, kind: type | None = None, *, fields: Collection[str] | None = None) -> list[FlagSpec]:
    """Flags of ``group`` whose values are not the defaults; only those that it has from ``kind``, or of ``fields``."""
    specs = (spec for spec in flags_of(kind or type(group)) if fields is None or spec.field in fields)
    return [spec for spec in specs if getattr(group, spec.field) != spec.default]


class _Signature:
    """What ``inspect.signature`` tells of the class that has it: its fields, all of them keywords."""

    def __get__(self, _: object, group: Any) -> inspect.Signature:
        keyword, empty = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
        return inspect.Signature(
            [
                inspect.Parameter(
                    each.name,
                    keyword,
                    default=empty if each.default is dataclasses.MISSING else each.default,
                    annotation=each.type,
                )
                for each in dataclasses.fields(group)
            ]
        )


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Settings:
    """Base of every group of settings: its subclasses are frozen dataclasses of keywords whose fields are flags.

    They need no decorator. Flags are read when the class is made, so that a field without help never reaches a user.
    The methods of a dataclass are inherited here: to compile them for each group would be a third of ``--help``'s time.
    """

    __signature__ = _Signature()
    _names: ClassVar[tuple[str, ...]]

    @override
    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclass(init=False, eq=False, repr=False, kw_only=True)(cls)
        cls._names = tuple(each.name for each in dataclasses.fields(cls))  # type: ignore[arg-type]
        flags_of(cls)

    def __init__(self, **given: Any) -> None:
        for each in dataclasses.fields(self):  # type: ignore[arg-type]
            value = given.pop(each.name, each.default)
            if value is dataclasses.MISSING:
                raise TypeError(f"{type(self).__name__}() needs {each.name}")
            object.__setattr__(self, each.name, value)
        if given:
            raise TypeError(f"{type(self).__name__}() has no {' and no '.join(given)}")
        self.__post_init__()

    def __post_init__(self) -> None:
        """Fill in values that follow from others."""

    @override
    def __setattr__(self, name: str, value: object) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")

    @override
    def __delattr__(self, name: str) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")

    @override
    def __eq__(self, other: object) -> bool:
        return self is other or (type(other) is type(self) and _values(self) == _values(other))

    @override
    def __hash__(self) -> int:
        return hash(_values(self))

    @override
    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in zip(self._names, _values(self)))
        return f"{type(self).__qualname__}({values})"


def _values(group: Settings) -> tuple[Any, ...]:
    """Values of a group, in the order of its fields; each look-up of what is computed for settings compares them."""
    return tuple(map(vars(group).__getitem__, group._names))


def group_name(group: type) -> str:
    """Name of a group in files and reports: ``ModelConfig`` -> ``model``."""
    return group.__name__.removesuffix("Config").lower()


def derive(group: object, field: str, value: Any) -> None:
    """Fill in a field that was not given; for ``__post_init__`` of a frozen group."""
    if getattr(group, field) is None:
        object.__setattr__(group, field, value)


def _read_type(hint: Any, where: str) -> tuple[type, tuple[Any, ...], int | None, bool]:
    """``kind``, ``choices``, ``count`` and ``is_list`` of an annotation."""
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
