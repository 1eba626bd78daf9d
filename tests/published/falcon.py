"""Falcon, whose older and newer decoders differ in norms and key/value heads."""

from __future__ import annotations

from typing import Any

FALCON: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
NEWER: dict[str, Any] = {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon newer": ("falcon", NEWER),
    "falcon newer, one norm, biases": ("falcon", {**NEWER, "num_ln_in_parallel_attn": 1, "bias": True}),
    "falcon newer, six heads, one group": ("falcon", {**NEWER, "num_attention_heads": 6, "num_kv_heads": 1}),
    "falcon newer, one norm, one group": (
        "falcon",
        {**NEWER, "num_ln_in_parallel_attn": 1, "num_kv_heads": 1, "multi_query": False},
    ),
    "falcon alibi, in sequence, six heads, biases": (
        "falcon",
        {**FALCON, "alibi": True, "num_attention_heads": 6, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "falcon alibi, one group": ("falcon", {**FALCON, "alibi": True}),
    "falcon multi-query": ("falcon", FALCON),
    "falcon multi-head, untied, narrow mlp": (
        "falcon",
        {**FALCON, "multi_query": False, "tie_word_embeddings": False, "ffn_hidden_size": 80, "activation": "relu"},
    ),
    "falcon in sequence, three heads, biases": (
        "falcon",
        {**FALCON, "num_attention_heads": 3, "parallel_attn": False, "bias": True},
    ),
}
