"""Settings of a ``config.json``, read one by one; errors for those that can't be converted name file and value."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from megatron.config.activation import Activation
from megatron.config.model import ModelConfig
from megatron.errors import CheckpointError, enumeration
from megatron.small_files import check_kinds, shown

T = TypeVar("T")
Json = Mapping[str, Any]
GELUS: dict[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
}
"""Transformers' names of GELU -> ours."""
UNGATED: dict[str, Activation] = {**GELUS, "relu": "relu", "relu2": "squared_relu"}
"""Transformers' names of activations without a gate -> ours."""
_MOST_SHOWN = 200  # characters of a value; a longer list is named by its length


class ConfigReader:
    """Settings with their defaults, and errors that name the file; raises CheckpointError for one of another type.

    ``kinds``: types of all settings that may be asked for. ``asked``: those that were, also within others.
    """

    def __init__(
        self, config: Json, defaults: Json, where: str, *, kinds: Mapping[str, Any], asked: set[str] | None = None
    ) -> None:
        check_kinds(config, kinds, where=where, error=CheckpointError)
        self._values = {**defaults, **config}
        self._where, self._kinds = where, kinds
        self.asked: set[str] = set() if asked is None else asked

    def __call__(self, name: str) -> Any:
        """A setting that the architecture needs; CheckpointError where it is missing."""
        if self.get(name) is None:
            raise CheckpointError(f"{self._where} lacks {name}, which the architecture needs")
        return self._values[name]

    def get(self, name: str, default: Any = None) -> Any:
        """A setting, or ``default``."""
        assert name in self._kinds, f"the format reads {name}, and its kinds lack it"
        self.asked.add(name)
        return self._values.get(name, default)

    def within(self, *names: str) -> ConfigReader:
        """The settings of these objects together, the later before the earlier; errors name the last that is there."""
        given = [name for name in names if self.get(name)]
        inside = {key: value for name in given for key, value in self._values[name].items()}
        where = f"{self._where}: {(given or names)[-1]}"
        return ConfigReader(inside, {}, where, kinds=self._kinds, asked=self.asked)

    def but(self, **values: Any) -> ConfigReader:
        """These settings with some other values."""
        return ConfigReader({**self._values, **values}, {}, self._where, kinds=self._kinds, asked=self.asked)

    def refuse(self, name: str, advice: str) -> CheckpointError:
        """The error for a setting that can't be converted."""
        value = self.get(name)
        words = shown(value) if len(repr(value)) > _MOST_SHOWN else repr(value)
        return CheckpointError(f"{self._where} says {name} = {words}: {advice}")

    def error(self, sentence: str) -> CheckpointError:
        """The error for settings that don't fit together."""
        return CheckpointError(f"{self._where}: {sentence}")

    def expect(self, **values: Any) -> None:
        """Raise CheckpointError for a setting that is there and is not the one value that can be converted."""
        for name, value in values.items():
            found = self.get(name, value)
            if found != value and not (found is None and value is not True):  # transformers reads null as false
                raise self.refuse(name, f"this project supports only {value!r}")

    def one_of(self, name: str, values: Mapping[str, T]) -> T:
        """What ``values`` have for the setting ``name``; CheckpointError where it is another."""
        if self(name) not in values:
            only = f"supports only {next(iter(values))!r}" if len(values) == 1 else f"has {enumeration(values)}"
            raise self.refuse(name, f"this project {only}")
        return values[self(name)]


@dataclass(frozen=True, kw_only=True)
class Feature:
    """What several types of models have in common, as rotary positions, and no table of names can say.

    ``by_code`` names fields of our architecture, ``read`` makes them of the settings, ``write`` makes the settings of
    the architecture, ``refuse`` gives reasons why an architecture isn't one of these. ``fixed``: values of other fields
    in all these models, where they aren't the default. ``defaults``: what transformers takes for a missing setting.
    ``kinds``: types and bounds of the settings that ``read`` asks for.
    """

    by_code: Collection[str] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    kinds: Mapping[str, Any] = field(default_factory=dict)
    read: Callable[[ConfigReader], dict[str, Any]] = lambda reader: {}
    write: Callable[[ModelConfig], dict[str, Any]] = lambda model: {}
    refuse: Callable[[ModelConfig], list[str]] = lambda model: []
