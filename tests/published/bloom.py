"""BLOOM."""

from __future__ import annotations

from typing import Any

BLOOM: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "n_layer": 3,
    "n_head": 4,
    "seq_length": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("bloom", BLOOM),
    "bloom three heads, untied": ("bloom", {**BLOOM, "n_head": 3, "tie_word_embeddings": False}),
    "bloom twelve heads, residual after norms": (
        "bloom",
        {**BLOOM, "n_head": 12, "apply_residual_connection_post_layernorm": True},
    ),
}
