"""StableLM: Llama's names, with LayerNorm and a part of each head rotated; attention and MLP may be in parallel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron.config.model import ModelConfig
from megatron.core.conversion.huggingface.biases import query_biases
from megatron.core.conversion.huggingface.rotary import partial_rotary
from megatron.core.conversion.tables import Row
from megatron.core.conversion.transforms import stacked
from megatron.core.models.gpt.huggingface.llama import LLAMA, OURS, THEIRS


def _head_norms(model: ModelConfig) -> Sequence[Row]:
    """A norm without bias for each head of queries and of keys."""
    ours = f"{OURS}.self_attention"
    theirs = f"{THEIRS}.self_attn"
    counts = {"q": model.num_attention_heads, "k": model.num_query_groups}
    return [
        Row(
            f"{ours}.{letter}_layernorm",
            tuple(f"{theirs}.{letter}_layernorm.norms.{head}" for head in range(count)),
            stacked(count),
        )
        for letter, count in counts.items()
    ]


def _shared_head_norms(model: ModelConfig) -> list[str]:
    if model.qk_layernorm and model.qk_layernorm_kind != "per_head":
        return ["heads are not normalized with a weight of their own each"]
    if model.qk_layernorm and model.rotary_interleaved:
        return ["rotary pairs are neighbours in heads that are normalized"]
    return []


STABLELM = replace(
    LLAMA,
    rows=_head_norms,
    architecture="StableLmForCausalLM",
    settings={
        **{ours: theirs for ours, theirs in LLAMA.settings.items() if ours != "kv_channels"},
        "norm_epsilon": "layer_norm_eps",
        "hidden_dropout": "hidden_dropout",
        "qk_layernorm": "qk_layernorm",
        "parallel_attention": "use_parallel_residual",
    },
    optional=("num_key_value_heads",),
    features=(partial_rotary(0.25), query_biases("use_qkv_bias", default=False)),
    by_code=("qk_layernorm_kind",),
    fixed={"position_embedding_type": "rope"},
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "num_key_value_heads": 32,
        "layer_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "tie_word_embeddings": False,
        "qk_layernorm": False,
        "use_parallel_residual": False,
    },
    read=lambda known: {"qk_layernorm_kind": "per_head"} if known("qk_layernorm") else {},
    refuse=_shared_head_norms,
    about="StableLM 3B 4E1T, Zephyr, 2 1.6B and 12B; with or without norms of queries and keys; tied or not",
    example="stabilityai/stablelm-2-1_6b",
)
TYPES = {"stablelm": STABLELM}
