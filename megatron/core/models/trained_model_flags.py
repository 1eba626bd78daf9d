"""Command lines of tools that use a trained model; those of Megatron-LM's launch scripts repeat flags of training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron.config.flags import flags_of
from megatron.config.legacy_flags import LEGACY_FLAGS, LegacyFlag
from megatron.config.parse import parse_groups
from megatron.config.run import CORE_GROUPS
from megatron.core.models.registry import FAMILIES

_OF_TRAINING = LegacyFlag("ignored", "a trained model's settings come from its checkpoint, and nothing is trained")


def parse_with_trained_model(
    argv: Sequence[str], *groups: type, prog: str, about: str = "", legacy: Mapping[str, LegacyFlag] | None = None
) -> tuple[Any, ...]:
    """Parse a command line for a trained model; flags of a run that trains, none of ``groups``, are taken with a
    remark.
    """
    of_families = (group for family in FAMILIES.values() for group in family.groups)
    of_training = {*LEGACY_FLAGS, *_spellings(CORE_GROUPS), *_spellings(of_families)} - _spellings(groups)
    table = dict.fromkeys(of_training, _OF_TRAINING) | dict(legacy or {})
    return parse_groups(argv, *groups, prog=prog, about=about, legacy=table)


def _spellings(groups: Iterable[type]) -> set[str]:
    return {spelling for group in groups for spec in flags_of(group) for spelling in spec.spellings()}
