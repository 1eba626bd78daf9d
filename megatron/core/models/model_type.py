"""``--model-type``: the family whose flags a tool for all families takes."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.config.flags import Settings, flag
from megatron.config.parse import read_given
from megatron.core.models.registry import FAMILIES, Family, family_titled

_TITLES = [family.title for family in FAMILIES.values()]


class ModelTypeConfig(Settings):
    """The model family of the other flags."""

    model_type: str = flag(
        f"Family of the model: {', '.join(_TITLES)}, or the name of an installed one.", default=_TITLES[0]
    )


def family_asked(argv: Sequence[str]) -> Family:
    """The family of ``--model-type``, on the command line or in a file; the first where it is missing.

    Raises ConfigError for one that isn't known.
    """
    return family_titled(read_given(argv, ModelTypeConfig).value("model_type"))
