"""Biases of linear layers in config.json, where a published type may have them in some layers only."""

from __future__ import annotations

from megatron.config.model import LAYER_BIASES, ModelConfig
from megatron.core.conversion.huggingface.config_reader import Feature

_FIELDS = ("add_bias_linear", *LAYER_BIASES)


def biases(*, qkv: bool, output: bool, mlp: bool) -> dict[str, bool]:
    """Fields of a model with biases in these layers. ``output``: of attention."""
    return dict(zip(_FIELDS, (qkv and output and mlp, qkv, output, mlp)))


def _uneven(model: ModelConfig) -> list[str]:
    """Why a type whose attention has biases in all of its layers or in none has no such model."""
    if model.add_qkv_bias == model.add_attention_output_bias:
        return []
    layers = ("the query/key/value layer", "the output layer of attention")
    has, lacks = layers if model.add_qkv_bias else layers[::-1]
    return [f"{has} has biases and {lacks} has none"]


NO_BIASES = Feature(fixed=biases(qkv=False, output=False, mlp=False))
BIASES = Feature(
    by_code=_FIELDS,
    defaults={"attention_bias": False, "mlp_bias": False},
    kinds={"attention_bias": bool, "mlp_bias": bool},
    read=lambda known: biases(qkv=known("attention_bias"), output=known("attention_bias"), mlp=known("mlp_bias")),
    write=lambda model: {"attention_bias": model.add_qkv_bias, "mlp_bias": model.add_mlp_bias},
    refuse=_uneven,
)
"""Biases of attention and of the MLP, each or none, in the settings of Llama and its relatives."""


def attention_biases(*, default: bool = False, mlp: bool = False) -> Feature:
    """Biases of attention by ``attention_bias``. ``mlp``: whether the MLP always has biases, or never."""
    return Feature(
        by_code=_FIELDS,
        fixed={"add_mlp_bias": mlp, **({} if mlp else {"add_bias_linear": False})},
        defaults={"attention_bias": default},
        kinds={"attention_bias": bool},
        read=lambda known: biases(qkv=known("attention_bias"), output=known("attention_bias"), mlp=mlp),
        write=lambda model: {"attention_bias": model.add_qkv_bias},
        refuse=_uneven,
    )


def query_biases(setting: str, *, default: bool) -> Feature:
    """Biases of queries, keys and values alone, by ``setting``."""
    return Feature(
        by_code=("add_qkv_bias",),
        fixed={name: False for name in _FIELDS if name != "add_qkv_bias"},
        defaults={setting: default},
        kinds={setting: bool},
        read=lambda known: {"add_qkv_bias": known(setting)},
        write=lambda model: {setting: model.add_qkv_bias},
    )


def even_biases(setting: str, *, default: bool) -> Feature:
    """Biases in all linear layers or in none, by ``setting``."""

    def refuse(model: ModelConfig) -> list[str]:
        found = {model.add_qkv_bias, model.add_attention_output_bias, model.add_mlp_bias}
        return [] if len(found) == 1 else ["some linear layers have biases and others have none"]

    return Feature(
        by_code=_FIELDS,
        defaults={setting: default},
        kinds={setting: bool},
        read=lambda known: biases(qkv=known(setting), output=known(setting), mlp=known(setting)),
        write=lambda model: {setting: model.add_bias_linear},
        refuse=refuse,
    )
