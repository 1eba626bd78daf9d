"""A run some of whose settings are not known: those that are missing or wrong, and what follows from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from megatron.config.run import RunConfig

_Settings = TypeVar("_Settings")


class UnknownSettingError(Exception):
    """A rule read a setting that is not known, so its result is unknown."""


def without(run: RunConfig, fields: Collection[str]) -> RunConfig:
    """``run``, in which reading one of ``fields``, directly or through a property, raises UnknownSettingError."""
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
