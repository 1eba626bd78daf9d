"""Biases of linear layers in config.json, where a published type may have them in some layers only."""

from __future__ import annotations

from megatron.config.model import LAYER_BIASES, ModelConfig
from megatron.core.conversion.huggingface.known import Known

BIAS_FIELDS = ("add_bias_linear", *LAYER_BIASES)
"""Fields of our architecture that ``biases`` makes."""

BIAS_DEFAULTS = {"attention_bias": False, "mlp_bias": False}
"""The settings of Llama and its relatives."""


def biases(*, qkv: bool, output: bool, mlp: bool) -> dict[str, bool]:
    """``BIAS_FIELDS`` of a model with biases in these layers. ``output``: of attention."""
    return dict(zip(BIAS_FIELDS, (qkv and output and mlp, qkv, output, mlp)))


def even_biases(has: bool) -> dict[str, bool]:
    """``BIAS_FIELDS`` of a model with biases in all linear layers or in none."""
    return biases(qkv=has, output=has, mlp=has)


def partly_biased(model: ModelConfig) -> list[str]:
    """Why a type with biases in all linear layers or in none has no such model."""
    found = {model.add_qkv_bias, model.add_attention_output_bias, model.add_mlp_bias}
    return [] if len(found) == 1 else ["some linear layers have biases and others have none"]


def read_biases(known: Known) -> dict[str, bool]:
    """``BIAS_FIELDS`` from ``BIAS_DEFAULTS``' settings."""
    attention = bool(known("attention_bias"))
    return biases(qkv=attention, output=attention, mlp=bool(known("mlp_bias")))


def attention_biases(known: Known) -> dict[str, bool]:
    """``BIAS_FIELDS`` of a type whose MLP never has biases, from ``attention_bias``."""
    attention = bool(known("attention_bias"))
    return biases(qkv=attention, output=attention, mlp=False)


def written_biases(model: ModelConfig) -> dict[str, bool]:
    """``BIAS_DEFAULTS``' settings of a model that ``uneven_biases`` says nothing about."""
    return {"attention_bias": model.add_qkv_bias, "mlp_bias": model.add_mlp_bias}


def uneven_biases(model: ModelConfig) -> list[str]:
    """Why a type whose attention has biases in all of its layers or in none has no such model."""
    if model.add_qkv_bias == model.add_attention_output_bias:
        return []
    layers = ("the query/key/value layer", "the output layer of attention")
    has, lacks = layers if model.add_qkv_bias else layers[::-1]
    return [f"{has} has biases and {lacks} has none"]
