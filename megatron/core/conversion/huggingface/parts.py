"""Parts that a published type's models have, such as experts: settings in config.json, and names of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from megatron.config.family import PartConfig
from megatron.config.flags import flags_of
from megatron.config.model import ModelConfig
from megatron.core.conversion.huggingface.config_reader import ConfigReader, Json
from megatron.core.conversion.tables import Row
from megatron.errors import CheckpointError

P = TypeVar("P", bound=PartConfig)


@dataclass(frozen=True, kw_only=True)
class PublishedPart(Generic[P]):
    """A part of a type's models.

    ``group``: the class of its settings. ``read``: its fields from the settings of config.json. ``write``: the settings
    from those fields; what reading doesn't find again is refused. ``rows``: of the mapping table, for a model that has
    the part. ``check``: raises CheckpointError for settings that don't fit together.
    """

    group: type[P]
    read: Callable[[ConfigReader], dict[str, Any]]
    write: Callable[[P, ModelConfig], dict[str, Any]]
    rows: Callable[[P], Sequence[Row]]
    check: Callable[[P, ConfigReader], None] = lambda part, reader: None

    def of(self, reader: ConfigReader) -> P:
        """The part that a config.json describes; CheckpointError for settings that don't fit together."""
        found = self.group(**self.read(reader))
        self.check(found, reader)
        return found

    def among(self, groups: Sequence[object]) -> P:
        """The part among the settings of a model."""
        return self.group.among(groups)

    def missing(self, part: P, model: ModelConfig) -> Sequence[str]:
        """Why a model isn't of the type, as one that lacks the part; nothing where settings may say what it has."""
        return ()

    def differences(self, part: P, settings: Json, *, defaults: Json, kinds: Mapping[str, Any]) -> list[str]:
        """What ``part`` has that reading ``settings``, those which a model with it would be written with, doesn't find.

        ``defaults``, ``kinds``: of the type.
        """
        known = dict.fromkeys({*kinds, *settings}, Any)
        try:
            usual = self.of(ConfigReader(settings, defaults, "it", kinds=known))
        except CheckpointError as error:  # a combination that this type doesn't have
            return [str(error)]
        return different_flags(part, self.as_in(part, usual))

    def as_in(self, part: P, usual: P) -> P:
        """``usual`` with the spellings of ``part`` where these mean the same."""
        return usual


def different_flags(part: PartConfig, usual: PartConfig) -> list[str]:
    """A phrase for each setting of the architecture in which ``part`` is not like ``usual``."""
    return [
        f"{flag.positive} is {getattr(part, flag.field)} and not {getattr(usual, flag.field)}"
        for flag in flags_of(type(part))
        if flag.options.architecture and getattr(part, flag.field) != getattr(usual, flag.field)
    ]
