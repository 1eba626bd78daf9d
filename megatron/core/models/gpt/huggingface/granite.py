"""Granite 3: Llama with multipliers of embeddings, scores, residuals and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.config.model import ModelConfig
from megatron.core.conversion.bounds import Factor
from megatron.core.conversion.huggingface.config_reader import ConfigReader
from megatron.core.conversion.huggingface.format import ModelType
from megatron.core.models.gpt.huggingface.llama import LLAMA

_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier")
_SETTINGS = (*_MULTIPLIERS, "attention_multiplier", "logits_scaling")


def _usual_scale(head_width: int) -> float:
    return float(head_width**-0.5)


def _read(reader: ConfigReader) -> dict[str, Any]:
    scale = float(reader("attention_multiplier"))
    width = reader.get("head_dim") or reader("hidden_size") // reader("num_attention_heads")
    return {
        **{name: float(reader(name)) for name in _MULTIPLIERS},
        "softmax_scale": None if width and scale == _usual_scale(width) else scale,
        "logits_multiplier": 1 / reader("logits_scaling"),
    }


def _written(model: ModelConfig) -> dict[str, Any]:
    return {
        **{name: getattr(model, name) for name in _MULTIPLIERS},
        "attention_multiplier": model.softmax_scale or _usual_scale(model.kv_channels),
        "logits_scaling": 1 / model.logits_multiplier,
    }


GRANITE = replace(
    LLAMA,
    architecture="GraniteForCausalLM",
    by_code=(*_MULTIPLIERS, "softmax_scale", "logits_multiplier"),
    spellings=("logits_scaling",),  # 1 / (1 / 49) is not 49
    defaults={**LLAMA.defaults, **dict.fromkeys(_SETTINGS, 1.0)},
    kinds=dict.fromkeys(_SETTINGS, Factor),
    read=_read,
    write=_written,
    about="Granite 3, dense; biases and rotary scaling as for llama; tied or not",
    example="ibm-granite/granite-3.3-2b-base",
)
TYPES: dict[str, ModelType] = {"granite": GRANITE}
