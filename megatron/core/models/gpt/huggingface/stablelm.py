"""StableLM: Llama's names, with LayerNorm and a part of each head rotated; attention and MLP may be in parallel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron.config.model import ModelConfig
from megatron.core.conversion.huggingface.biases import biases
from megatron.core.conversion.huggingface.known import Known
from megatron.core.conversion.huggingface.rotary import FIELDS, KINDS, read_rotary, written_rotary
from megatron.core.conversion.tables import Row
from megatron.core.conversion.transforms import stacked
from megatron.core.models.gpt.huggingface.llama import LLAMA, OURS, THEIRS


def _read(known: Known) -> dict[str, Any]:
    return {
        "add_qkv_bias": bool(known("use_qkv_bias")),
        **({"qk_layernorm": True, "qk_layernorm_kind": "per_head"} if known("qk_layernorm") else {}),
        "parallel_attention": bool(known("use_parallel_residual")),
        **read_rotary(known, partial=True),
    }


def _head_norms(model: ModelConfig) -> Sequence[Row]:
    """A norm without bias for each head of queries and of keys."""
    ours = f"{OURS}.self_attention"
    theirs = f"{THEIRS}.self_attn"
    counts = {"q": model.num_attention_heads, "k": model.num_query_groups}
    return [
        Row(
            f"{ours}.{letter}_layernorm",
            tuple(f"{theirs}.{letter}_layernorm.norms.{head}" for head in range(count)),
            stacked(count),
        )
        for letter, count in counts.items()
    ]


def _shared_head_norms(model: ModelConfig) -> list[str]:
    if model.qk_layernorm and model.qk_layernorm_kind != "per_head":
        return ["heads are not normalized with a weight of their own each"]
    if model.qk_layernorm and model.rotary_interleaved:
        return ["rotary pairs are neighbours in heads that are normalized"]
    return []


STABLELM = replace(
    LLAMA,
    rows=_head_norms,
    architecture="StableLmForCausalLM",
    settings={
        **{ours: theirs for ours, theirs in LLAMA.settings.items() if ours != "kv_channels"},
        "norm_epsilon": "layer_norm_eps",
        "hidden_dropout": "hidden_dropout",
    },
    optional=("num_key_value_heads",),
    by_code=(
        "group_query_attention",
        "add_qkv_bias",
        "qk_layernorm",
        "qk_layernorm_kind",
        "parallel_attention",
        "rotary_percent",
        *FIELDS,
    ),
    fixed={
        **{name: value for name, value in biases(qkv=False, output=False, mlp=False).items() if name != "add_qkv_bias"},
        "position_embedding_type": "rope",
    },
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "num_key_value_heads": 32,
        "layer_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_qkv_bias": False,
        "qk_layernorm": False,
        "use_parallel_residual": False,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
    kinds={**KINDS, **dict.fromkeys(("use_qkv_bias", "use_parallel_residual", "qk_layernorm"), bool)},
    read=_read,
    write=lambda model: {
        "use_qkv_bias": model.add_qkv_bias,
        "qk_layernorm": model.qk_layernorm,
        "use_parallel_residual": model.parallel_attention,
        **written_rotary(model, partial=True),
    },
    refuse=_shared_head_norms,
    about="StableLM 3B 4E1T, Zephyr, 2 1.6B and 12B; with or without norms of queries and keys; tied or not",
    example="stabilityai/stablelm-2-1_6b",
)
TYPES = {"stablelm": STABLELM}
