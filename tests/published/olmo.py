"""OLMo 1, 2 and 3."""

from __future__ import annotations

from typing import Any

from tests.published.sizes import SIZES

ODD = {**SIZES, "hidden_size": 42, "num_attention_heads": 3, "num_key_value_heads": 3}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 2e4,
    "factor": 8.0,
    "original_max_position_embeddings": 8,
    "attention_factor": 1.2,
}
OLMO3 = {**SIZES, "num_hidden_layers": 4, "sliding_window": 8}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo": ("olmo", {**SIZES, "clip_qkv": 0.7}),
    "olmo not clipped, tied": ("olmo", {**SIZES, "tie_word_embeddings": True}),
    "olmo three heads": ("olmo", {**ODD, "clip_qkv": 1.5}),
    "olmo with biases": ("olmo", {**SIZES, "attention_bias": True, "num_key_value_heads": 1}),
    "olmo2": ("olmo2", SIZES),
    "olmo3": ("olmo3", OLMO3),
    "olmo3 scaled, tied": (
        "olmo3",
        {
            **OLMO3,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            },
        },
    ),
    "olmo3 three heads, other layers": (
        "olmo3",
        {**ODD, "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    ),
    "olmo2 with biases": ("olmo2", {**SIZES, "attention_bias": True}),
    "olmo2 tied, three heads": ("olmo2", {**ODD, "tie_word_embeddings": True}),
    "olmo2 one group, wide heads": ("olmo2", {**SIZES, "num_key_value_heads": 1, "head_dim": 20}),
}
