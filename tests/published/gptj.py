"""GPT-J."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, Any] = {"vocab_size": 101, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 64, "rotary_dim": 8}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gptj": ("gptj", SMALL),
    "gptj with three heads rotated whole, tied": (
        "gptj",
        {**SMALL, "n_head": 3, "rotary_dim": 16, "n_inner": 80, "tie_word_embeddings": True},
    ),
    "gptj with exact GELU": ("gptj", {**SMALL, "rotary_dim": 4, "activation_function": "gelu"}),
}
