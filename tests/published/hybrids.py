"""Mamba-2, Nemotron-H, Bamba and Granite 4."""

from __future__ import annotations

from typing import Any

from tests.published.granite import SCALED
from tests.published.sizes import SIZES

MAMBA2: dict[str, Any] = {
    **{name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")},
    "state_size": 6,
    "num_heads": 8,
    "head_dim": SIZES["hidden_size"] // 4,
    "n_groups": 2,
    "chunk_size": 16,
}
NEMOTRON_H: dict[str, Any] = {
    **{name: value for name, value in SIZES.items() if name != "num_hidden_layers"},
    "hybrid_override_pattern": "M*-M",
    "head_dim": 10,
    "ssm_state_size": 6,
    "mamba_num_heads": 6,
    "mamba_head_dim": 5,
    "n_groups": 2,
    "chunk_size": 16,
    "time_step_min": 0.4,
}
EXPERTS: dict[str, Any] = {
    "hybrid_override_pattern": "ME*E",
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 1.7,
}
PAIRS: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 6,
    "mamba_chunk_size": 16,
}
BAMBA: dict[str, Any] = {**SIZES, **PAIRS, "attn_layer_indices": [1]}
GRANITE: dict[str, Any] = {
    **SCALED,
    **PAIRS,
    "layer_types": ["mamba", "attention", "mamba"],
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 44,
}
GRANITE_EXPERTS: dict[str, Any] = {**GRANITE, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 24}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": ("mamba2", MAMBA2),
    "mamba2 tied, limited steps, a convolution of 3": (
        "mamba2",
        {**MAMBA2, "tie_word_embeddings": True, "time_step_limit": [0.3, 0.8], "conv_kernel": 3, "n_groups": 1},
    ),
    "nemotron_h": ("nemotron_h", NEMOTRON_H),
    "nemotron_h with experts": ("nemotron_h", {**NEMOTRON_H, **EXPERTS}),
    "nemotron_h with experts in groups": (
        "nemotron_h",
        {**NEMOTRON_H, **EXPERTS, "hybrid_override_pattern": "M-E", "n_group": 3, "topk_group": 2},
    ),
    "nemotron_h with biases": ("nemotron_h", {**NEMOTRON_H, "mlp_bias": True}),
    "bamba": ("bamba", BAMBA),
    "bamba with biases, tied, limited steps, whole heads turned": (
        "bamba",
        {
            **BAMBA,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "time_step_limit": [0.0, 0.7],
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0, "partial_rotary_factor": 1.0},
        },
    ),
    "granitemoehybrid": ("granitemoehybrid", GRANITE),
    "granitemoehybrid with experts": ("granitemoehybrid", GRANITE_EXPERTS),
    "granitemoehybrid with rotary positions and no state": (
        "granitemoehybrid",
        {**GRANITE, "layer_types": ["attention"] * 3, "position_embedding_type": "rope", "tie_word_embeddings": True},
    ),
}
