"""GLM-4: half of each head is rotated, in neighbouring pairs.

The models of 2025 (``glm4``) also have norms after sublayers.
"""

from __future__ import annotations

from dataclasses import replace

from megatron.core.conversion.huggingface.biases import query_biases
from megatron.core.conversion.huggingface.format import ModelType
from megatron.core.conversion.huggingface.rotary import partial_rotary
from megatron.core.conversion.tables import Row
from megatron.core.conversion.transforms import NEIGHBOURING_QUERY_KEY_VALUE
from megatron.core.models.gpt.huggingface.llama import LLAMA, OURS, QKV, THEIRS

GLM = replace(
    LLAMA,
    architecture="GlmForCausalLM",
    table=(
        *(row for row in LLAMA.table if not row.ours.endswith(("linear_qkv", "linear_fc1"))),
        Row(f"{OURS}.self_attention.linear_qkv", QKV, NEIGHBOURING_QUERY_KEY_VALUE),
        Row(f"{OURS}.mlp.linear_fc1", f"{THEIRS}.mlp.gate_up_proj"),
    ),
    features=(partial_rotary(0.5), query_biases("attention_bias", default=True)),
    defaults={
        **LLAMA.defaults,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-07,
    },
    read=lambda known: {"rotary_interleaved": True},
    about="GLM-4 (9B and its chat models, in transformers' format); biases of queries, keys and values or none",
    example="zai-org/glm-4-9b-hf",
)
GLM4 = replace(
    GLM,
    architecture="Glm4ForCausalLM",
    table=(
        *GLM.table,
        Row(f"{OURS}.post_self_attn_layernorm", f"{THEIRS}.post_self_attn_layernorm"),
        Row(f"{OURS}.post_mlp_layernorm", f"{THEIRS}.post_mlp_layernorm"),
    ),
    fixed={**GLM.fixed, "norm_placement": "both"},
    about="GLM-4-0414 and GLM-Z1, with norms before and after sublayers",
    example="zai-org/GLM-4-9B-0414",
)
TYPES: dict[str, ModelType] = {"glm": GLM, "glm4": GLM4}
