"""Phi 1, 1.5 and 2."""

from __future__ import annotations

from typing import Any

from tests.published.sizes import SIZES

PHI: dict[str, Any] = {**SIZES, "bos_token_id": 0, "eos_token_id": 0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "phi": ("phi", PHI),
    "phi tied, multi-head, norms of queries and keys": (
        "phi",
        {**PHI, "num_key_value_heads": 4, "tie_word_embeddings": True, "qk_layernorm": True},
    ),
    "phi three heads, one group": ("phi", {**PHI, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "phi wide heads": ("phi", {**PHI, "head_dim": 16}),
    "phi whole heads rotated": ("phi", {**PHI, "partial_rotary_factor": 1.0}),
}
