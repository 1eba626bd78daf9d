"""Cohere's Command R: attention and MLP in parallel with one norm, neighbouring rotary pairs, and scaled logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.config.model import ModelConfig
from megatron.core.conversion.bounds import Factor
from megatron.core.conversion.huggingface.biases import attention_biases
from megatron.core.conversion.huggingface.config_reader import ConfigReader
from megatron.core.conversion.huggingface.rotary import ROTARY
from megatron.core.conversion.tables import Row
from megatron.core.conversion.transforms import NEIGHBOURING_QUERY_KEY_VALUE, Transform, neighbours
from megatron.core.models.gpt.huggingface.llama import LLAMA, OURS, QKV, THEIRS

_PER_HEAD = Transform(
    lambda parts, model: parts[0].flatten(),
    lambda tensor, model: [neighbours(tensor, model).view(-1, model.kv_channels)],
)


def _read(reader: ConfigReader) -> dict[str, Any]:
    return {
        **({"qk_layernorm": True, "qk_layernorm_kind": "per_head"} if reader("use_qk_norm") else {}),
        "logits_multiplier": float(reader("logit_scale")),
        "rotary_interleaved": True,
    }


def _other_head_norms(model: ModelConfig) -> list[str]:
    wrong = model.qk_layernorm and model.qk_layernorm_kind != "per_head"
    return ["heads are not normalized with a weight of their own each"] if wrong else []


COHERE = replace(
    LLAMA,
    architecture="CohereForCausalLM",
    table=(
        *LLAMA.table,
        Row(f"{OURS}.self_attention.linear_qkv", QKV, NEIGHBOURING_QUERY_KEY_VALUE),
        Row(f"{OURS}.self_attention.q_layernorm", f"{THEIRS}.self_attn.q_norm", _PER_HEAD),
        Row(f"{OURS}.self_attention.k_layernorm", f"{THEIRS}.self_attn.k_norm", _PER_HEAD),
    ),
    settings={**LLAMA.settings, "norm_epsilon": "layer_norm_eps"},
    features=(ROTARY, attention_biases()),
    by_code=("qk_layernorm", "qk_layernorm_kind", "logits_multiplier"),
    fixed={
        **{name: value for name, value in LLAMA.fixed.items() if name != "normalization"},
        "parallel_attention": True,
        "norm_parameters": "weight",
    },
    defaults={
        **LLAMA.defaults,
        "max_position_embeddings": 8192,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "use_qk_norm": False,
        "tie_word_embeddings": True,
        "rope_theta": 500000.0,
    },
    kinds={"logit_scale": Factor, "use_qk_norm": bool},
    read=_read,
    write=lambda model: {"use_qk_norm": model.qk_layernorm, "logit_scale": model.logits_multiplier},
    refuse=_other_head_norms,
    about="Command R and R+, Aya 23; with or without norms of queries and keys; rotary scaling as for llama",
    example="CohereForAI/c4ai-command-r-v01",
)
TYPES = {"cohere": COHERE}
