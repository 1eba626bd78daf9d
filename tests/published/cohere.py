"""Cohere's Command R."""

from __future__ import annotations

from typing import Any

from tests.published.sizes import SIZES

COHERE: dict[str, Any] = {**SIZES, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere": ("cohere", {**COHERE, "use_qk_norm": True}),
    "cohere six heads, one group, biases, untied": (
        "cohere",
        {**COHERE, "num_attention_heads": 6, "num_key_value_heads": 1, "tie_word_embeddings": False}
        | {"attention_bias": True, "logit_scale": 0.3},
    ),
}
