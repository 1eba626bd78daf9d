"""Granite."""

from __future__ import annotations

from typing import Any

from tests.published.sizes import SIZES

SCALED: dict[str, Any] = {
    **SIZES,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.15,
    "logits_scaling": 6.0,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": ("granite", SCALED),
    "granite tied, usual scale, wide heads": (
        "granite",
        {**SCALED, "head_dim": 16, "attention_multiplier": 0.25, "tie_word_embeddings": True},
    ),
    "granite with biases, three heads": (
        "granite",
        {
            **SCALED,
            "hidden_size": 42,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
}
