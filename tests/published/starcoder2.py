"""StarCoder2."""

from __future__ import annotations

from typing import Any

from tests.published.sizes import SIZES

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "starcoder2": ("starcoder2", SIZES),
    "starcoder2 without biases, untied": ("starcoder2", {**SIZES, "use_bias": False, "tie_word_embeddings": False}),
    "starcoder2 with a window": ("starcoder2", {**SIZES, "sliding_window": 9}),
    "starcoder2 three heads, one group, exact gelu": (
        "starcoder2",
        {**SIZES, "num_attention_heads": 3, "num_key_value_heads": 1, "hidden_act": "gelu"},
    ),
}
