"""The families of models that generate text."""

from __future__ import annotations

from megatron.core.models.registry import FAMILIES

GENERATIVE = {name: FAMILIES[name].train_spec for name in ("gpt", "t5", "vlm")}
