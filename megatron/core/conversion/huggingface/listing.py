"""The published types that convert, as ``convert.py --list`` and docs/published_models.md show them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.conversion.huggingface.formats import formats


@dataclass(frozen=True)
class PublishedType:
    """A ``model_type`` of config.json. ``family``: the title of ours. ``classes``: of transformers. ``converts``: which
    of its models do, ``only`` the settings that must have certain values. ``example``: a repository of the Hub, or "".
    """

    family: str
    model_type: str
    classes: tuple[str, ...]
    converts: str
    only: tuple[str, ...]
    example: str


def published_types() -> Iterator[PublishedType]:
    """Every type, family by family."""
    for family, published in formats():
        for name, described in published.types.items():
            limits = {described.activation: " or ".join(described.activations)} if described.activations else {}
            limits |= {setting: json.dumps(value) for setting, value in described.expected.items()}
            only = tuple(f"{setting} = {values}" for setting, values in limits.items())
            classes = published.classes(name)
            yield PublishedType(family.title, name, classes, described.about, only, described.example)
