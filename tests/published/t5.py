"""T5, the original and v1.1, and mT5."""

from __future__ import annotations

from typing import Any

T5: dict[str, Any] = {
    "vocab_size": 101,
    "d_model": 48,
    "d_kv": 10,
    "d_ff": 80,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "decoder_start_token_id": 0,
    "architectures": ["T5ForConditionalGeneration"],
}
V1_1: dict[str, Any] = {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
MT5: dict[str, Any] = {**V1_1, "architectures": ["MT5ForConditionalGeneration"]}
FAR: dict[str, Any] = {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("t5", T5),
    "t5 of as many layers, far positions": ("t5", {**T5, **FAR, "num_decoder_layers": None}),
    "t5 v1.1": ("t5", V1_1),
    "t5 gated by silu": ("t5", {**V1_1, "feed_forward_proj": "gated-silu"}),
    "t5 gated by exact gelu": ("t5", {**V1_1, "dense_act_fn": "gelu"}),
    "t5, exact gelu, 3 heads": ("t5", {**T5, "feed_forward_proj": "gelu", "num_heads": 3}),
    "t5, tanh gelu, one layer": (
        "t5",
        {**T5, "feed_forward_proj": "gelu_new", "num_layers": 1, "num_decoder_layers": 1},
    ),
    "mt5": ("mt5", MT5),
    "mt5 tied, relu, 3 heads": (
        "mt5",
        {**MT5, "tie_word_embeddings": True, "feed_forward_proj": "relu", "num_heads": 3},
    ),
}
