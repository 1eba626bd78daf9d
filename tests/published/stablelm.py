"""StableLM."""

from __future__ import annotations

from typing import Any

from tests.published.sizes import SIZES

STABLELM: dict[str, Any] = {**SIZES, "num_attention_heads": 6, "num_key_value_heads": 6}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "stablelm": ("stablelm", STABLELM),
    "stablelm parallel, three heads, one group, biases": (
        "stablelm",
        {**SIZES, "num_attention_heads": 3, "num_key_value_heads": 1, "use_parallel_residual": True}
        | {"use_qkv_bias": True},
    ),
    "stablelm norms of heads, grouped": (
        "stablelm",
        {**STABLELM, "num_key_value_heads": 2, "qk_layernorm": True, "use_parallel_residual": True},
    ),
    "stablelm grouped, tied": ("stablelm", {**STABLELM, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "stablelm whole heads rotated": ("stablelm", {**STABLELM, "partial_rotary_factor": 1.0}),
}
