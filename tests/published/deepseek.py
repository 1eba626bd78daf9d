"""DeepSeek-V2 and V3."""

from __future__ import annotations

from typing import Any

from tests.published.sizes import SIZES

LATENT = {
    **SIZES,
    "num_key_value_heads": 4,
    "q_lora_rank": 14,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8,
    "mscale": 0.707,
    "mscale_all_dim": 1.3,
}
V2 = {**LATENT, "n_shared_experts": 2, "routed_scaling_factor": 1.7}
IN_GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 3}
V3 = {**LATENT, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 1}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("deepseek_v2", {**V2, **IN_GROUPS, "rope_parameters": YARN}),
    "deepseek_v2 lite, three heads": (
        "deepseek_v2",
        {**V2, "q_lora_rank": None, "num_attention_heads": 3, "num_key_value_heads": 3, "first_k_dense_replace": 0},
    ),
    "deepseek_v2 biased, one scale": (
        "deepseek_v2",
        {
            **V2,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {name: value for name, value in YARN.items() if name != "mscale"},
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {**V3, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "rope_parameters": YARN},
    ),
    "deepseek_v3 of five choices in three groups": (
        "deepseek_v3",
        {**V3, "n_group": 4, "topk_group": 3, "num_experts_per_tok": 5},
    ),
    "deepseek_v3 without groups and latent queries": ("deepseek_v3", {**V3, "q_lora_rank": None}),
}
