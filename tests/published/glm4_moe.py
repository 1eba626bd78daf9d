"""GLM-4.5."""

from __future__ import annotations

from typing import Any

from tests.published.sizes import SIZES

GLM = {
    **SIZES,
    "head_dim": 16,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4_moe": ("glm4_moe", {**GLM, "use_qk_norm": True}),
    "glm4_moe of one expert a token, whose score stays as it is": (
        "glm4_moe",
        {**GLM, "num_experts_per_tok": 1, "norm_topk_prob": False},
    ),
    "glm4_moe of one choice in all groups": (
        "glm4_moe",
        {**GLM, "n_group": 3, "topk_group": 3, "num_experts_per_tok": 1, "norm_topk_prob": False},
    ),
    "glm4_moe biased, three heads, tied": (
        "glm4_moe",
        {
            **GLM,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "n_group": 3,
            "topk_group": 2,
            "num_experts_per_tok": 4,
        },
    ),
}
