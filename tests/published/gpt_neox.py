"""GPT-NeoX, Pythia."""

from __future__ import annotations

from typing import Any

from tests.published.sizes import SIZES

NEOX: dict[str, Any] = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
WIDE: dict[str, Any] = {"rope_type": "default", "rope_theta": 25000.0, "partial_rotary_factor": 1.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox": ("gpt_neox", {**NEOX, "rope_parameters": {**WIDE, "partial_rotary_factor": 0.5}}),
    "gpt_neox in sequence, three heads, tied": (
        "gpt_neox",
        {**NEOX, "num_attention_heads": 3, "use_parallel_residual": False, "tie_word_embeddings": True},
    ),
    "gpt_neox without attention biases, whole heads": (
        "gpt_neox",
        {**NEOX, "attention_bias": False, "rope_parameters": WIDE, "hidden_act": "gelu_new"},
    ),
}
