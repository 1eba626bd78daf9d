"""Small models of every published type: ``model_type`` and settings of transformers.

A module for each kind of model has ``CASES``, of which the first of each type is checked in the default tier
everywhere.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

MODELS: dict[str, tuple[str, dict[str, Any]]] = {}
"""``model_type`` and settings, by the name of the case."""

for _module in sorted(each.name for each in iter_modules(__path__)):
    MODELS |= getattr(import_module(f"{__name__}.{_module}"), "CASES", {})

FIRST = {settings[0]: name for name, settings in [*MODELS.items()][::-1]}
"""The first case of each ``model_type``."""

LIKE_ANOTHER = (
    "mistral",
    "qwen2",
    "qwen3 with windows",
    "starcoder2",
    "smollm3",
    "granite",
    "glm",
    "glm4",
    "gemma",
    "gemma2",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
    "mixtral",
    "deepseek_v2",
    "glm4_moe",
    "gptj",
    "gpt_neox",
    "gpt2",
    "nemotron",
    "stablelm",
    "phi",
    "phi3",
    "cohere",
    "bloom",
    "falcon newer",
    "opt",
    "bert",
    "roberta",
    "camembert",
    "xlm-roberta",
    "megatron-bert",
    "t5",
    "mamba2",
    "bamba",
    "granitemoehybrid",
)
"""First cases of types whose layers another type has, too, or the equivalence table's own variants."""
assert {*LIKE_ANOTHER} <= {*FIRST.values()}
