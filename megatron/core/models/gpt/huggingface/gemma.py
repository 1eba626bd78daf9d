"""Gemma 1, 2 and 3 (text): norm weights stored minus one, embeddings times sqrt(hidden size), GELU gates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.config.model import ModelConfig
from megatron.core.conversion.bounds import Factor, Layers
from megatron.core.conversion.huggingface.biases import attention_biases
from megatron.core.conversion.huggingface.config_reader import ConfigReader
from megatron.core.conversion.huggingface.format import ModelType
from megatron.core.conversion.huggingface.rotary import ROTARY
from megatron.core.conversion.huggingface.two_rotaries import windows_and_rotaries
from megatron.core.conversion.huggingface.windows import every_second, windows_where
from megatron.core.conversion.tables import Row
from megatron.core.models.gpt.huggingface.llama import LLAMA, OURS, THEIRS

_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_SCALAR = "query_pre_attn_scalar"


def _embedding_multiplier(hidden_size: int) -> float:
    return float(hidden_size**0.5)


def _read_embedding(reader: ConfigReader) -> dict[str, Any]:
    reader.expect(use_bidirectional_attention=False)
    return {"embedding_multiplier": _embedding_multiplier(reader("hidden_size"))}


def _other_multiplier(model: ModelConfig) -> list[str]:
    usual = model.embedding_multiplier == _embedding_multiplier(model.hidden_size)
    return [] if usual else ["embeddings are not multiplied by sqrt(hidden size)"]


GEMMA = replace(
    LLAMA,
    architecture="GemmaForCausalLM",
    activations={"gelu_pytorch_tanh": "geglu_tanh", "gelu": "geglu_tanh"},  # transformers reads "gelu" as the other
    features=(ROTARY, attention_biases()),
    by_code=("embedding_multiplier",),
    fixed={**LLAMA.fixed, "apply_layernorm_1p": True},
    defaults={
        **LLAMA.defaults,
        "hidden_act": "gelu_pytorch_tanh",
        "num_key_value_heads": 16,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    kinds={"use_bidirectional_attention": bool},
    read=_read_embedding,
    refuse=_other_multiplier,
    about="Gemma 1; rotary scaling as for llama; tied or not",
    example="google/gemma-2b",
)


def _read_2(reader: ConfigReader) -> dict[str, Any]:
    scalar = reader(_SCALAR)
    scale = None if scalar == reader("head_dim") else float(scalar**-0.5)  # None: the usual one
    caps = {name: float(value) if (value := reader.get(name)) else None for name in _CAPS}
    return {**_read_embedding(reader), **caps, "softmax_scale": scale}


def _written_2(model: ModelConfig) -> dict[str, Any]:
    scalar = model.kv_channels if model.softmax_scale is None else model.softmax_scale**-2
    return {**{name: getattr(model, name) for name in _CAPS}, _SCALAR: round(scalar)}


def _not_gemma_2(model: ModelConfig) -> list[str]:
    scale = model.softmax_scale
    whole = scale is None or scale == round(scale**-2) ** -0.5
    found = _other_multiplier(model)
    return found if whole else [*found, "the scale of attention scores is not 1 / sqrt(a whole number)"]


_WINDOWS = windows_where(every_second, sliding_window=4096)
GEMMA2 = replace(
    GEMMA,
    architecture="Gemma2ForCausalLM",
    table=(
        *(row for row in LLAMA.table if row.ours != f"{OURS}.pre_mlp_layernorm"),
        Row(f"{OURS}.post_self_attn_layernorm", f"{THEIRS}.post_attention_layernorm"),
        Row(f"{OURS}.pre_mlp_layernorm", f"{THEIRS}.pre_feedforward_layernorm"),
        Row(f"{OURS}.post_mlp_layernorm", f"{THEIRS}.post_feedforward_layernorm"),
    ),
    activation="hidden_activation",
    activations={"gelu_pytorch_tanh": "geglu_tanh"},
    features=(*GEMMA.features, _WINDOWS),
    by_code=(*GEMMA.by_code, *_CAPS, "softmax_scale"),
    fixed={**GEMMA.fixed, "norm_placement": "both"},
    defaults={
        **GEMMA.defaults,
        "hidden_activation": "gelu_pytorch_tanh",
        "num_key_value_heads": 4,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        _SCALAR: 256,
    },
    kinds={**GEMMA.kinds, **dict.fromkeys(_CAPS, Factor), _SCALAR: Factor},
    read=_read_2,
    write=_written_2,
    refuse=_not_gemma_2,
    about="Gemma 2; windows in any layers, soft caps or none; rotary scaling as for llama; tied or not",
    example="google/gemma-2-2b",
)


def _usual_windows_3(reader: ConfigReader) -> list[bool]:
    every = reader.get("_sliding_window_pattern") or reader("sliding_window_pattern")
    return [(layer + 1) % every != 0 for layer in range(reader("num_hidden_layers"))]


GEMMA3 = replace(
    GEMMA2,
    architecture="Gemma3ForCausalLM",
    features=(attention_biases(), windows_and_rotaries(_usual_windows_3, sliding_window=4096)),
    by_code=tuple(name for name in GEMMA2.by_code if name != _CAPS[0]),
    expected={_CAPS[0]: None},  # transformers ignores it
    fixed={**GEMMA2.fixed, "qk_layernorm": True},
    defaults={
        **GEMMA2.defaults,
        **dict.fromkeys(_CAPS),
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window_pattern": 6,
    },
    kinds={
        **GEMMA2.kinds,
        **dict.fromkeys(("sliding_window_pattern", "_sliding_window_pattern"), Layers),
    },
    about="Gemma 3, text only; windows in any layers; linear, Llama 3 and YaRN scaling of the others; tied or not",
    example="google/gemma-3-1b-pt",
)
TYPES: dict[str, ModelType] = {"gemma": GEMMA, "gemma2": GEMMA2, "gemma3_text": GEMMA3}
