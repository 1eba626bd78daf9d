"""Mixtral, Qwen 2 and 3 with experts, and OLMoE."""

from __future__ import annotations

from typing import Any

from tests.published.llama import YARN
from tests.published.sizes import SIZES

MIXTRAL = {**SIZES, "num_local_experts": 5, "num_experts_per_tok": 2}
QWEN2 = {
    **SIZES,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
QWEN3 = {**SIZES, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 22, "head_dim": 16}
OLMOE = {**SIZES, "num_key_value_heads": 4, "num_experts": 7, "num_experts_per_tok": 3, "intermediate_size": 24}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", MIXTRAL),
    "mixtral with a window, tied, all experts": (
        "mixtral",
        {**MIXTRAL, "sliding_window": 9, "tie_word_embeddings": True, "num_experts_per_tok": 5},
    ),
    "mixtral three heads, one group": (
        "mixtral",
        {**MIXTRAL, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 20, "rope_parameters": YARN},
    ),
    "qwen2_moe": ("qwen2_moe", QWEN2),
    "qwen2_moe with dense layers, scores that add up": (
        "qwen2_moe",
        {**QWEN2, "mlp_only_layers": [1], "norm_topk_prob": True, "qkv_bias": False, "tie_word_embeddings": True},
    ),
    "qwen2_moe every second layer, windows": (
        "qwen2_moe",
        {**QWEN2, "decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3_moe": ("qwen3_moe", {**QWEN3, "norm_topk_prob": True}),
    "qwen3_moe without scores that add up, dense first": ("qwen3_moe", {**QWEN3, "mlp_only_layers": [0]}),
    "qwen3_moe with a window": ("qwen3_moe", {**QWEN3, "use_sliding_window": True, "sliding_window": 9}),
    "qwen3_moe with biases": ("qwen3_moe", {**QWEN3, "attention_bias": True}),
    "olmoe": ("olmoe", OLMOE),
    "olmoe three heads, one group, scores that add up": (
        "olmoe",
        {**OLMOE, "num_attention_heads": 3, "num_key_value_heads": 1, "norm_topk_prob": True},
    ),
}
