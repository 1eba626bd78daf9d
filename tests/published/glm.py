"""GLM-4, with and without norms after the sublayers."""

from __future__ import annotations

from typing import Any

from tests.published.llama import YARN
from tests.published.sizes import SIZES

GLM = {**SIZES, "head_dim": 12, "pad_token_id": None}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "glm": ("glm", GLM),
    "glm without biases, tied": ("glm", {**GLM, "attention_bias": False, "tie_word_embeddings": True}),
    "glm three heads, whole heads rotated": (
        "glm",
        {**GLM, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16, "partial_rotary_factor": 1.0},
    ),
    "glm yarn": ("glm", {**GLM, "num_key_value_heads": 1, "rope_parameters": YARN}),
    "glm4": ("glm4", GLM),
    "glm4 without biases, wide heads": ("glm4", {**GLM, "attention_bias": False, "head_dim": 20}),
}
