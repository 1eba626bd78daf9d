"""GLM-4: half of each head is rotated, in neighbouring pairs; the models of 2025 (``glm4``) have norms after sublayers,
too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.config.model import ModelConfig
from megatron.core.conversion.huggingface.biases import biases
from megatron.core.conversion.huggingface.format import ModelType
from megatron.core.conversion.huggingface.known import Known
from megatron.core.conversion.huggingface.rotary import read_rotary, written_rotary
from megatron.core.conversion.tables import Row
from megatron.core.conversion.transforms import NEIGHBOURING_QUERY_KEY_VALUE
from megatron.core.models.gpt.huggingface.llama import LLAMA, OURS, THEIRS


def _read(known: Known) -> dict[str, Any]:
    rotary = read_rotary(known, partial=True)
    return {**biases(qkv=known("attention_bias"), output=False, mlp=False), **rotary, "rotary_interleaved": True}


def _write(model: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": model.add_qkv_bias, **written_rotary(model, partial=True)}


GLM = replace(
    LLAMA,
    architecture="GlmForCausalLM",
    table=(
        *(row for row in LLAMA.table if not row.ours.endswith(("linear_qkv", "linear_fc1"))),
        Row(
            f"{OURS}.self_attention.linear_qkv",
            tuple(f"{THEIRS}.self_attn.{letter}_proj" for letter in "qkv"),
            NEIGHBOURING_QUERY_KEY_VALUE,
        ),
        Row(f"{OURS}.mlp.linear_fc1", f"{THEIRS}.mlp.gate_up_proj"),
    ),
    by_code=(*LLAMA.by_code, "rotary_percent"),
    fixed={**LLAMA.fixed, "add_bias_linear": False, "add_attention_output_bias": False, "add_mlp_bias": False},
    defaults={
        **{name: value for name, value in LLAMA.defaults.items() if name != "mlp_bias"},
        "attention_bias": True,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-07,
        "partial_rotary_factor": 0.5,
    },
    read=_read,
    write=_write,
    refuse=lambda model: [],
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
