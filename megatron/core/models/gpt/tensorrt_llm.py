"""Decoders that TensorRT-LLM builds, by the names of its architectures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.core.conversion.tensorrt_llm.architecture import Architecture, Settings

_RENORMALIZE = 1  # of the experts that a token chose: the softmax is over them alone
_NO_BIASES = {
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "add_attention_output_bias": False,
    "add_mlp_bias": False,
}
_LLAMA = {
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "position_embedding_type": "rope",
    **_NO_BIASES,
}
_GPT_ACTIVATIONS = {
    "gelu_tanh": "gelu",
    "relu": "relu",
    "squared_relu": "squared-relu",
    "swiglu": "swiglu",
    "geglu_tanh": "geglu",
}


def _rotary(model: ModelConfig) -> dict[str, Any]:
    """Fields of rotary positions."""
    scaling: dict[str, Any] | None = None
    if model.use_rope_scaling:
        scaling = {
            "type": "llama3",
            "rope_type": "llama3",
            "factor": model.rope_scaling_factor,
            "low_freq_factor": model.rope_low_freq_factor,
            "high_freq_factor": model.rope_high_freq_factor,
            "original_max_position_embeddings": model.original_max_position_embeddings,
        }
    elif model.rotary_seq_len_interpolation_factor is not None:
        scaling = {"type": "linear", "factor": model.rotary_seq_len_interpolation_factor}
    return {"position_embedding_type": "rope_gpt_neox", "rotary_base": model.rotary_base, "rotary_scaling": scaling}


def _read_rotary(config: Settings) -> dict[str, Any]:
    found: dict[str, Any] = {"rotary_base": config["rotary_base"]}
    scaling = config["rotary_scaling"] or {}
    if scaling.get("type") == "llama3":
        found |= {
            "use_rope_scaling": True,
            "rope_scaling_factor": scaling["factor"],
            "rope_low_freq_factor": scaling["low_freq_factor"],
            "rope_high_freq_factor": scaling["high_freq_factor"],
            "original_max_position_embeddings": scaling["original_max_position_embeddings"],
        }
    elif scaling:
        found["rotary_seq_len_interpolation_factor"] = scaling["factor"]
    return found


def _biases(model: ModelConfig) -> dict[str, Any]:
    """Biases of attention's two layers, and of the MLP's."""
    return {"attn_bias": model.add_qkv_bias, "mlp_bias": model.add_mlp_bias}


def _read_biases(config: Settings) -> dict[str, Any]:
    attention, mlp = config["attn_bias"], config["mlp_bias"]
    return {
        "add_bias_linear": attention and mlp,
        "add_qkv_bias": attention,
        "add_attention_output_bias": attention,
        "add_mlp_bias": mlp,
    }


def _llama(model: ModelConfig, groups: Sequence[object]) -> dict[str, Any]:
    """Fields of Llama's code, with the factors that Granite has."""
    width = math.sqrt(model.kv_channels)
    return {
        "hidden_act": "silu",
        **_rotary(model),
        **_biases(model),
        "embedding_multiplier": model.embedding_multiplier,
        "attention_multiplier": 1.0 if model.softmax_scale is None else model.softmax_scale * width,
        "residual_multiplier": model.residual_multiplier,
        "output_multiplier_scale": model.logits_multiplier,
    }


def _read_llama(config: Settings) -> Mapping[str, Any]:
    width = math.sqrt(config["head_size"])
    factor = config["attention_multiplier"]
    return {
        **_read_rotary(config),
        **_read_biases(config),
        "embedding_multiplier": config["embedding_multiplier"],
        "softmax_scale": None if factor == 1.0 else factor / width,
        "residual_multiplier": config["residual_multiplier"],
        "logits_multiplier": config["output_multiplier_scale"],
    }


def _mixtral(model: ModelConfig, groups: Sequence[object]) -> dict[str, Any]:
    experts = MoEConfig.among(groups)
    return {
        **_llama(model, groups),
        "hidden_act": "swiglu",
        "intermediate_size": experts.moe_ffn_hidden_size or model.ffn_hidden_size,
        "moe": {
            "num_experts": experts.num_experts or 0,
            "top_k": experts.moe_router_topk if experts.has_experts else 0,
            "normalization_mode": _RENORMALIZE,
        },
    }


def _experts(config: Settings) -> Sequence[object]:
    sizes = {"num_experts": config["moe"]["num_experts"], "moe_router_topk": config["moe"]["top_k"]}
    return (MoEConfig(**sizes, moe_ffn_hidden_size=config["intermediate_size"]),)


def _qwen(kind: str) -> dict[str, Any]:
    """How a generation of Qwen is written and read."""
    normed = kind == "qwen3"

    def write(model: ModelConfig, groups: Sequence[object]) -> dict[str, Any]:
        return {
            "hidden_act": "silu",
            **_rotary(model),
            "attn_bias": not normed,
            "mlp_bias": False,
            "qk_layernorm": normed,
            "qwen_type": kind,
            "seq_length": model.max_position_embeddings,
            "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        }

    facts = {**_LLAMA, "add_qkv_bias": not normed, "qk_layernorm": normed}
    return {"facts": facts, "write": write, "read": _read_rotary}


def _gemma(model: ModelConfig, groups: Sequence[object]) -> dict[str, Any]:
    return {"hidden_act": "gelu_pytorch_tanh", **_rotary(model), "attn_bias": False, "mlp_bias": False}


def _read_gemma(config: Settings) -> Mapping[str, Any]:
    return {**_read_rotary(config), "embedding_multiplier": math.sqrt(config["hidden_size"])}


def _gemma2(model: ModelConfig, groups: Sequence[object]) -> dict[str, Any]:
    scale = model.softmax_scale
    return {
        **_gemma(model, groups),
        "query_pre_attn_scalar": model.kv_channels if scale is None else round(scale**-2),
        "final_logit_softcapping": model.final_logit_softcapping,
        "attn_logit_softcapping": model.attn_logit_softcapping,
    }


def _read_gemma2(config: Settings) -> Mapping[str, Any]:
    scalar = config["query_pre_attn_scalar"]
    return {
        **_read_gemma(config),
        "softmax_scale": None if scalar == config["head_size"] else scalar**-0.5,
        "final_logit_softcapping": config["final_logit_softcapping"],
        "attn_logit_softcapping": config["attn_logit_softcapping"],
    }


def _gpt(model: ModelConfig, groups: Sequence[object]) -> dict[str, Any]:
    """Fields of GPT's code, which Megatron-LM's own decoders, StarCoder 2 and Nemotron share."""
    rotary: dict[str, Any] = {"position_embedding_type": model.position_embedding_type}
    if model.is_rotary:
        kind = "rope_gptj" if model.rotary_interleaved else "rope_gpt_neox"
        rotary = {**_rotary(model), "position_embedding_type": kind, "rotary_pct": model.rotary_percent}
    width = math.sqrt(model.kv_channels)
    return {
        "hidden_act": _GPT_ACTIVATIONS.get(model.activation, "gelu"),
        **rotary,
        "bias": model.add_qkv_bias,
        "q_scaling": 1.0 if model.softmax_scale is None else 1 / (model.softmax_scale * width),
        "embedding_scale": None if model.embedding_multiplier == 1.0 else model.embedding_multiplier,
    }


def _read_gpt(config: Settings) -> Mapping[str, Any]:
    ours = {theirs: own for own, theirs in _GPT_ACTIVATIONS.items()}
    kind, bias = config["position_embedding_type"], config["bias"]
    found: dict[str, Any] = {
        **dict.fromkeys(_NO_BIASES, bias),
        "activation": ours[config["hidden_act"]],
        "softmax_scale": None
        if config["q_scaling"] == 1.0
        else 1 / (config["q_scaling"] * math.sqrt(config["head_size"])),
        "embedding_multiplier": config["embedding_scale"] or 1.0,
    }
    if kind.startswith("rope"):
        found |= {"position_embedding_type": "rope", "rotary_interleaved": kind == "rope_gptj"}
        return {**found, **_read_rotary(config), "rotary_percent": config["rotary_pct"]}
    return {**found, "position_embedding_type": "learned_absolute"}


ARCHITECTURES = (
    Architecture(name="LlamaForCausalLM", facts=_LLAMA, write=_llama, read=_read_llama),
    Architecture(name="MixtralForCausalLM", facts=_LLAMA, write=_mixtral, read=_read_llama, groups=_experts),
    Architecture(name="Qwen2ForCausalLM", **_qwen("qwen2")),
    Architecture(name="Qwen3ForCausalLM", **_qwen("qwen3")),
    Architecture(
        name="GemmaForCausalLM",
        facts={**_LLAMA, "activation": "geglu_tanh"},
        write=_gemma,
        read=_read_gemma,
        splits_words=True,
    ),
    Architecture(
        name="Gemma2ForCausalLM",
        facts={**_LLAMA, "activation": "geglu_tanh", "norm_placement": "both"},
        write=_gemma2,
        read=_read_gemma2,
        norms={
            "input_layernorm": "input_layernorm",
            "post_self_attn_layernorm": "post_layernorm",
            "pre_mlp_layernorm": "pre_feedforward_layernorm",
            "post_mlp_layernorm": "post_feedforward_layernorm",
        },
        splits_words=True,
    ),
    Architecture(name="GPTForCausalLM", facts={"normalization": "LayerNorm"}, write=_gpt, read=_read_gpt),
)
"""All that are written, the first that fits a model."""
