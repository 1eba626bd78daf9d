"""Gemma 1, 2 and 3."""

from __future__ import annotations

from typing import Any

from tests.published.sizes import SIZES

GEMMA: dict[str, Any] = {**SIZES, "head_dim": 16, "pad_token_id": None}  # transformers gives padding no gradient
ODD: dict[str, Any] = {"hidden_size": 42, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 10}
GEMMA2: dict[str, Any] = {
    **GEMMA,
    "sliding_window": 8,
    "query_pre_attn_scalar": 12,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
}
GEMMA3: dict[str, Any] = {
    **GEMMA,
    "num_hidden_layers": 4,
    "sliding_window": 8,
    "query_pre_attn_scalar": 20,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
}
SCALED = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 3e3},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", GEMMA),
    "gemma untied, three heads": ("gemma", {**GEMMA, **ODD, "tie_word_embeddings": False}),
    "gemma with biases": ("gemma", {**GEMMA, "attention_bias": True, "num_key_value_heads": 4}),
    "gemma2": ("gemma2", GEMMA2),
    "gemma2 untied, three heads, no caps": (
        "gemma2",
        {
            **GEMMA2,
            **ODD,
            "tie_word_embeddings": False,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "query_pre_attn_scalar": 10,
        },
    ),
    "gemma3": ("gemma3_text", GEMMA3),
    "gemma3 scaled, three heads, capped": (
        "gemma3_text",
        {
            **GEMMA3,
            **ODD,
            "rope_parameters": SCALED,
            "final_logit_softcapping": 2.0,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3 with its own pattern": ("gemma3_text", {**GEMMA3, "layer_types": None, "num_hidden_layers": 7}),
    "gemma3 with full attention": ("gemma3_text", {**GEMMA3, "layer_types": ["full_attention"] * 4}),
    "gemma2 with other layers": (
        "gemma2",
        {**GEMMA2, "layer_types": ["full_attention", "full_attention", "sliding_attention"], "attention_bias": True},
    ),
}
