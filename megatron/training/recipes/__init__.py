"""One recipe a family: the module's name is the family's, and its ``RECIPE`` is the recipe."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from megatron.config.families import Family

if TYPE_CHECKING:
    from megatron.training.recipe import Recipe


def recipe_of(family: Family) -> Recipe:
    """The family's recipe."""
    recipe: Recipe = import_module(f"{__name__}.{family.name}").RECIPE
    return recipe
