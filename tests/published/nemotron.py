"""Nemotron."""

from __future__ import annotations

from typing import Any

from tests.published.sizes import SIZES

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "nemotron": ("nemotron", SIZES),
    "nemotron one group, wide heads, tied": (
        "nemotron",
        {**SIZES, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 20, "tie_word_embeddings": True},
    ),
    "nemotron with attention biases": ("nemotron", {**SIZES, "attention_bias": True}),
    "nemotron with biases": ("nemotron", {**SIZES, "num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True}),
    "nemotron whole heads rotated": ("nemotron", {**SIZES, "hidden_size": 24, "partial_rotary_factor": 1.0}),
}
