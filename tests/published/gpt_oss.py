"""gpt-oss."""

from __future__ import annotations

from typing import Any

from tests.published.sizes import SIZES

OSS = {
    **SIZES,
    "head_dim": 16,
    "intermediate_size": 24,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 9,
    "swiglu_limit": 0.4,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8,
    "truncate": False,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss": ("gpt_oss", {**OSS, "rope_parameters": YARN}),
    "gpt_oss with full attention alone": ("gpt_oss", {**OSS, "layer_types": ["full_attention"] * 3}),
    "gpt_oss in whole groups": (
        "gpt_oss",
        {**OSS, "hidden_size": 64, "intermediate_size": 64, "num_local_experts": 3, "num_hidden_layers": 1},
    ),
    "gpt_oss as wide as its experts, full attention first": (
        "gpt_oss",
        {
            **OSS,
            "intermediate_size": 48,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
}
