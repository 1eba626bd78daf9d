"""Qwen3-Next and OLMo Hybrid."""

from __future__ import annotations

from typing import Any

from tests.published.sizes import SIZES

NETS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
}
QWEN = {
    **SIZES,
    **NETS,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 22,
    "shared_expert_intermediate_size": 40,
    # The norm of a head divides the first results of a document, which are almost zero, by their size. With 1e-6 a
    # change of initial weights in their last digit is one of 1e-8 in the gradient norm of the third step.
    "rms_norm_eps": 1e-2,
}
OLMO = {
    **SIZES,
    **NETS,
    "num_hidden_layers": 4,
    "pad_token_id": None,
    "eos_token_id": None,
    "rms_norm_eps": 1e-2,  # as above
    "rope_parameters": {"rope_type": "default", "rope_theta": None},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next", QWEN),
    "qwen3_next other layers, dense ones, biases, tied": (
        "qwen3_next",
        {
            **QWEN,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "mlp_only_layers": [1],
            "attention_bias": True,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
            "linear_conv_kernel_dim": 3,
        },
    ),
    "olmo_hybrid": ("olmo_hybrid", OLMO),
    "olmo_hybrid rotary, positive, other layers": (
        "olmo_hybrid",
        {
            **OLMO,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
            "linear_allow_neg_eigval": False,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 2e4},
        },
    ),
}
