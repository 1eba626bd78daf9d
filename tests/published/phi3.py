"""Phi-3 and Phi-4."""

from __future__ import annotations

from typing import Any

from tests.published.llama import LONGROPE
from tests.published.sizes import SIZES

PHI = {**SIZES, "pad_token_id": None}
PARTIAL = {**LONGROPE, "partial_rotary_factor": 0.5, "short_factor": [1.0, 1.2, 1.5], "long_factor": [1.0, 4.0, 9.0]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("phi3", PHI),
    "phi3 longrope, short": (
        "phi3",
        {**PHI, "rope_parameters": LONGROPE, "original_max_position_embeddings": 40, "num_key_value_heads": 4},
    ),
    "phi3 longrope, long": (
        "phi3",
        {**PHI, "rope_parameters": LONGROPE, "original_max_position_embeddings": 39, "sliding_window": 7},
    ),
    "phi3 wide heads": ("phi3", {**PHI, "head_dim": 20, "num_attention_heads": 3, "num_key_value_heads": 3}),
    "phi4 mini": (
        "phi3",
        {
            **PHI,
            "rope_parameters": PARTIAL,
            "original_max_position_embeddings": 16,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
        },
    ),
}
