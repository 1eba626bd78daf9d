"""Llama and the types with its names: Mistral, Qwen 2 and 3."""

from __future__ import annotations

from typing import Any

from tests.published.sizes import SIZES

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA3_OTHER = {**LLAMA3, "factor": 3.0, "low_freq_factor": 0.5, "high_freq_factor": 2.0}
LLAMA3_OTHER["original_max_position_embeddings"] = 16
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.4, 1.5, 1.9],
    "long_factor": [1.0, 1.5, 2.0, 4.0, 6.0, 9.0],
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SIZES),
    "llama multi-head, tied": ("llama", {**SIZES, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama one group, wide heads": ("llama", {**SIZES, "num_key_value_heads": 1, "head_dim": 20}),
    "llama with biases": ("llama", {**SIZES, "attention_bias": True, "mlp_bias": True}),
    "llama with attention biases": ("llama", {**SIZES, "attention_bias": True}),
    "llama with mlp biases": ("llama", {**SIZES, "mlp_bias": True}),
    "llama 3": ("llama", {**SIZES, "rope_parameters": LLAMA3}),
    "llama stretched": (
        "llama",
        {**SIZES, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama 3 with other factors": ("llama", {**SIZES, "rope_parameters": LLAMA3_OTHER}),
    "llama yarn": ("llama", {**SIZES, "rope_parameters": YARN}),
    "llama yarn, every setting": (
        "llama",
        {
            **SIZES,
            "rope_parameters": {**YARN, "beta_fast": 3.0, "beta_slow": 0.5, "truncate": False, "attention_factor": 1.3},
        },
    ),
    "llama yarn, two scales": ("llama", {**SIZES, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.4}}),
    "llama dynamic, short": ("llama", {**SIZES, "rope_parameters": DYNAMIC}),
    "llama dynamic, long": ("llama", {**SIZES, "rope_parameters": DYNAMIC, "max_position_embeddings": 16}),
    "llama longrope, short": (
        "llama",
        {**SIZES, "rope_parameters": {**LONGROPE, "original_max_position_embeddings": 40, "attention_factor": 1.2}},
    ),
    "llama longrope, long": (
        "llama",
        {**SIZES, "rope_parameters": {**LONGROPE, "original_max_position_embeddings": 39, "factor": 8.0}},
    ),
    "smollm2": ("llama", {**SIZES, "num_attention_heads": 3, "num_key_value_heads": 3, "tie_word_embeddings": True}),
    "mistral": ("mistral", {**SIZES, "sliding_window": None}),
    "mistral, window as long as sequences": ("mistral", {**SIZES, "sliding_window": 64, "head_dim": 16}),
    "mistral with a window": ("mistral", {**SIZES, "sliding_window": 8}),
    "qwen2": ("qwen2", SIZES),
    "qwen2 with windows": (
        "qwen2",
        {**SIZES, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
    ),
    "qwen2 with windows in all layers": (
        "qwen2",
        {**SIZES, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0},
    ),
    "qwen3 with windows": (
        "qwen3",
        {
            **SIZES,
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen2 tied": (
        "qwen2",
        {**SIZES, "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "qwen2 yarn": ("qwen2", {**SIZES, "rope_parameters": {**YARN, "rope_theta": 1e6}}),
    "qwen3": ("qwen3", {**SIZES, "head_dim": 16}),
    "qwen3 one group, five heads, biases": (
        "qwen3",
        {**SIZES, "head_dim": 12, "num_attention_heads": 5, "num_key_value_heads": 1, "attention_bias": True},
    ),
    "qwen3 tied": ("qwen3", {**SIZES, "head_dim": 16, "tie_word_embeddings": True}),
    "qwen3 yarn": ("qwen3", {**SIZES, "head_dim": 16, "rope_parameters": {**YARN, "rope_theta": 1e6}}),
}
