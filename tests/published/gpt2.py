"""GPT-2."""

from __future__ import annotations

from typing import Any

GPT2: dict[str, Any] = {
    "vocab_size": 101,
    "n_positions": 64,
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 4,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", GPT2),
    "gpt2 untied, exact gelu": ("gpt2", {**GPT2, "tie_word_embeddings": False, "activation_function": "gelu"}),
    "gpt2 narrow mlp": ("gpt2", {**GPT2, "n_inner": 72}),
}
