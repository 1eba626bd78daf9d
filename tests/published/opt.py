"""OPT."""

from __future__ import annotations

from typing import Any

OPT: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "ffn_dim": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": None,  # else transformers gives the words' row no gradient
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "opt": ("opt", OPT),
    "opt untied, three heads, no biases": (
        "opt",
        {**OPT, "num_attention_heads": 3, "tie_word_embeddings": False, "enable_bias": False},
    ),
    "opt 350m, five heads": (
        "opt",
        {**OPT, "hidden_size": 60, "num_attention_heads": 5, "do_layer_norm_before": False, "word_embed_proj_dim": 28},
    ),
    "opt post-norm, untied": ("opt", {**OPT, "do_layer_norm_before": False, "tie_word_embeddings": False}),
    "opt wide words, untied": ("opt", {**OPT, "word_embed_proj_dim": 56, "tie_word_embeddings": False}),
    "opt norms without weights, gelu": (
        "opt",
        {**OPT, "layer_norm_elementwise_affine": False, "activation_function": "gelu"},
    ),
}
