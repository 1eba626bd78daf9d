"""OLMo 1 (LayerNorm without weights, clipped queries, keys and values), OLMo 2 (norms after the sublayers) and OLMo 3
(with windows).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.core.conversion.huggingface import two_rotaries, windows
from megatron.core.conversion.huggingface.biases import attention_biases, uneven_biases
from megatron.core.conversion.huggingface.format import ModelType
from megatron.core.conversion.huggingface.known import Known
from megatron.core.conversion.huggingface.rotary import read_rotary, written_rotary
from megatron.core.conversion.tables import Row
from megatron.core.models.gpt.huggingface.llama import LLAMA, OURS, THEIRS


def _read(known: Known) -> dict[str, Any]:
    return {**attention_biases(known), **read_rotary(known)}


_LLAMA = replace(
    LLAMA,
    read=_read,
    write=lambda model: {"attention_bias": model.add_qkv_bias, **written_rotary(model)},
    refuse=uneven_biases,
)
_FIXED = {**LLAMA.fixed, "add_bias_linear": False, "add_mlp_bias": False}
OLMO = replace(
    _LLAMA,
    architecture="OlmoForCausalLM",
    settings={
        **{ours: theirs for ours, theirs in LLAMA.settings.items() if ours != "norm_epsilon"},
        "clip_qkv": "clip_qkv",
    },
    optional=(*LLAMA.optional, "clip_qkv"),
    fixed={**_FIXED, "normalization": "LayerNorm", "norm_parameters": "none", "norm_epsilon": 1e-5},
    about="OLMo 1 and 1.7, with or without clipped queries, keys and values; rotary scaling as for llama; tied or not",
    example="allenai/OLMo-1B-hf",
)
OLMO2 = replace(
    _LLAMA,
    architecture="Olmo2ForCausalLM",
    table=(
        *LLAMA.table,
        Row(f"{OURS}.post_self_attn_layernorm", f"{THEIRS}.post_attention_layernorm"),
        Row(f"{OURS}.post_mlp_layernorm", f"{THEIRS}.post_feedforward_layernorm"),
    ),
    defaults={**LLAMA.defaults, "rms_norm_eps": 1e-5},
    fixed={**_FIXED, "norm_placement": "after", "qk_layernorm": True, "qk_layernorm_kind": "all_heads"},
    about="OLMo 2; rotary scaling as for llama; tied or not",
    example="allenai/OLMo-2-0425-1B",
)


def _read_3(known: Known) -> dict[str, Any]:
    usual = [(layer + 1) % 4 != 0 for layer in range(known("num_hidden_layers"))]
    layers = windows.read_layer_types(known, usual=usual)
    rotary = two_rotaries.read_rotaries(known, has_windows=layers["window_size"] is not None)
    return {**attention_biases(known), **rotary, **layers}


OLMO3 = replace(
    OLMO2,
    architecture="Olmo3ForCausalLM",
    by_code=(*OLMO2.by_code, *two_rotaries.FIELDS, *windows.FIELDS),
    defaults={**OLMO2.defaults, "sliding_window": 4096, "rope_theta": 500000.0},
    kinds={**OLMO2.kinds, **windows.KINDS, **two_rotaries.KINDS},
    read=_read_3,
    write=lambda model: {
        "attention_bias": model.add_qkv_bias,
        **two_rotaries.written_rotaries(model),
        **windows.written_beside_full(model),
    },
    refuse=lambda model: [
        *uneven_biases(model),
        *windows.without_later_keys(model),
        *two_rotaries.scaled_windows(model),
    ],
    about="OLMo 3; windows in any layers; linear, Llama 3 and YaRN scaling of the other layers; tied or not",
    example="allenai/Olmo-3-1025-7B",
)
TYPES: dict[str, ModelType] = {"olmo": OLMO, "olmo2": OLMO2, "olmo3": OLMO3}
