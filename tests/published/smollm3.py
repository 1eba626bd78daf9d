"""SmolLM 3."""

from __future__ import annotations

from typing import Any

from tests.published.llama import YARN
from tests.published.sizes import SIZES

SMOLLM3 = {**SIZES, "num_hidden_layers": 4, "pad_token_id": None}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm3": ("smollm3", SMOLLM3),
    "smollm3 other layers, untied": (
        "smollm3",
        {**SMOLLM3, "no_rope_layers": [0, 1, 1, 0], "tie_word_embeddings": False, "attention_bias": True},
    ),
    "smollm3 yarn, every second layer": (
        "smollm3",
        {**SMOLLM3, "no_rope_layer_interval": 2, "rope_parameters": YARN, "num_key_value_heads": 4},
    ),
    "smollm3 windows": (
        "smollm3",
        {
            **SMOLLM3,
            "use_sliding_window": True,
            "sliding_window": 7,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
        },
    ),
}
