"""OLMo 1, 2 and 3.

OLMo 1 has LayerNorm without weights, and clips queries, keys and values; OLMo 2 has norms after the sublayers, OLMo 3
also windows.
"""

from __future__ import annotations

from dataclasses import replace

from megatron.core.conversion.huggingface.biases import attention_biases
from megatron.core.conversion.huggingface.format import ModelType
from megatron.core.conversion.huggingface.rotary import ROTARY
from megatron.core.conversion.huggingface.two_rotaries import windows_and_rotaries
from megatron.core.conversion.tables import Row
from megatron.core.models.gpt.huggingface.llama import LLAMA, OURS, THEIRS

_FEATURES = (ROTARY, attention_biases())
OLMO = replace(
    LLAMA,
    features=_FEATURES,
    architecture="OlmoForCausalLM",
    settings={
        **{ours: theirs for ours, theirs in LLAMA.settings.items() if ours != "norm_epsilon"},
        "clip_qkv": "clip_qkv",
    },
    optional=(*LLAMA.optional, "clip_qkv"),
    fixed={**LLAMA.fixed, "normalization": "LayerNorm", "norm_parameters": "none", "norm_epsilon": 1e-5},
    about="OLMo 1 and 1.7, with or without clipped queries, keys and values; rotary scaling as for llama; tied or not",
    example="allenai/OLMo-1B-hf",
)
OLMO2 = replace(
    LLAMA,
    features=_FEATURES,
    architecture="Olmo2ForCausalLM",
    table=(
        *LLAMA.table,
        Row(f"{OURS}.post_self_attn_layernorm", f"{THEIRS}.post_attention_layernorm"),
        Row(f"{OURS}.post_mlp_layernorm", f"{THEIRS}.post_feedforward_layernorm"),
    ),
    defaults={**LLAMA.defaults, "rms_norm_eps": 1e-5},
    fixed={**LLAMA.fixed, "norm_placement": "after", "qk_layernorm": True, "qk_layernorm_kind": "all_heads"},
    about="OLMo 2; rotary scaling as for llama; tied or not",
    example="allenai/OLMo-2-0425-1B",
)


_THREE_OF_FOUR = windows_and_rotaries(
    lambda known: [(layer + 1) % 4 != 0 for layer in range(known("num_hidden_layers"))], sliding_window=4096
)
OLMO3 = replace(
    OLMO2,
    architecture="Olmo3ForCausalLM",
    features=(attention_biases(), _THREE_OF_FOUR),
    defaults={**OLMO2.defaults, "rope_theta": 500000.0},
    about="OLMo 3; windows in any layers; linear, Llama 3 and YaRN scaling of the other layers; tied or not",
    example="allenai/Olmo-3-1025-7B",
)
TYPES: dict[str, ModelType] = {"olmo": OLMO, "olmo2": OLMO2, "olmo3": OLMO3}
