"""Decoders that llama.cpp computes, by the names of its architectures."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from megatron.config.model import ModelConfig
from megatron.core.conversion.gguf.architecture import Architecture, Metadata
from megatron.core.conversion.gguf.transforms import NEIGHBOURS, PLUS_ONE, TURNED, UNGROUPED, Rule
from megatron.core.models.gpt.gguf.deepseek import DEEPSEEK
from megatron.core.models.gpt.gguf.delta_nets import QWEN3_NEXT
from megatron.core.models.gpt.gguf.gpt_oss import GPT_OSS
from megatron.core.models.gpt.gguf.hybrids import HYBRIDS

_GELU = 1e-3  # GELU and its relatives are looked up in a table of 16 bits
_HALVES = ("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias")


def _rules(*rules: Rule) -> Callable[[Sequence[object]], Sequence[Rule]]:
    return lambda groups: rules


_TURNED = _rules(Rule(_HALVES, NEIGHBOURS))
_FUSED = _rules(Rule(("query_key_value.weight", "query_key_value.bias"), UNGROUPED))
_ONE_MORE = _rules(Rule(("norm.weight", "norm1.weight", "norm2.weight"), PLUS_ONE))
_NO_OUTPUT_BIAS = ("attn_output.bias",)


def _narrow(model: ModelConfig, groups: Sequence[object]) -> Sequence[str]:
    """Why it isn't one of the architectures whose heads are always hidden size / heads wide."""
    wide = model.kv_channels * model.num_attention_heads != model.hidden_size
    return ["heads are not hidden size / heads wide"] if wide else []


def _ungrouped(model: ModelConfig, groups: Sequence[object]) -> Sequence[str]:
    shared = model.num_query_groups != model.num_attention_heads
    return [*_narrow(model, groups), *["keys and values are shared by heads"] * shared]


def _command_r(model: ModelConfig, groups: Sequence[object]) -> Sequence[str]:
    large = model.num_layers >= 64  # it looks for these norms by the number of layers
    return ["queries and keys are normalized in models of 64 layers and more, and in no others"] * (
        model.qk_layernorm != large
    )


def _falcon(keys: Metadata, tensors: Collection[str]) -> Mapping[str, Any]:
    two = any(name.endswith(".attn_norm_2.weight") for name in tensors)
    return {"parallel_attention": True, "parallel_layernorm": two}


def _gemma(keys: Metadata, tensors: Collection[str]) -> Mapping[str, Any]:
    return {"embedding_multiplier": float(keys["embedding_length"]) ** 0.5}


def _gemma_of(layers: int, defaults: Mapping[str, float]) -> Callable[[Metadata, Collection[str]], Mapping[str, Any]]:
    """Gemma 2 and 3, whose scores are scaled otherwise in a model of so many ``layers``, the largest."""

    def read(keys: Metadata, tensors: Collection[str]) -> Mapping[str, Any]:
        width = keys["embedding_length"] // keys["attention.head_count"]
        other = keys["block_count"] == layers and width != keys["attention.key_length"]
        caps = {name: keys.get(name, value) for name, value in defaults.items()}
        return {**_gemma(keys, tensors), **caps, **({"softmax_scale": float(width**-0.5)} if other else {})}

    return read


def _per_head(keys: Metadata, tensors: Collection[str]) -> Mapping[str, Any]:
    normed = any(name.endswith(".attn_q_norm.weight") for name in tensors)
    return {"qk_layernorm_kind": "per_head"} if normed else {}


def _stablelm(keys: Metadata, tensors: Collection[str]) -> Mapping[str, Any]:
    return {**_per_head(keys, tensors), "parallel_attention": "blk.0.ffn_norm.weight" not in tensors}


def _olmo2(keys: Metadata, tensors: Collection[str]) -> Mapping[str, Any]:
    return {"rotary_base_local": float(keys["rope.freq_base"])} if _scaled_beside_windows(keys) else {}


def _scaled_beside_windows(keys: Metadata) -> bool:
    return bool(keys.get("attention.sliding_window")) and "rope.scaling.type" in keys


ARCHITECTURES = (
    Architecture(name="llama", types=("llama", "mistral", "mixtral"), rules=_TURNED),
    Architecture(name="qwen2", types=("qwen2",), lacks=_NO_OUTPUT_BIAS),
    Architecture(name="qwen3", types=("qwen3",), lacks=_NO_OUTPUT_BIAS),
    Architecture(
        name="gpt2",
        types=("gpt2",),
        facts={"activation": "gelu_tanh"},
        rules=_rules(Rule(("c_attn.weight", "c_proj.weight", "c_fc.weight"), TURNED)),
        tolerance=_GELU,
    ),
    Architecture(
        name="gptneox",
        types=("gpt_neox",),
        facts={"activation": "gelu"},
        keys=("use_parallel_residual",),
        rules=_FUSED,
        read=lambda keys, tensors: {"parallel_layernorm": keys["use_parallel_residual"]},
        has_output=True,
        tolerance=_GELU,
    ),
    Architecture(name="bloom", types=("bloom",), rules=_FUSED, tolerance=_GELU),
    Architecture(
        name="falcon",
        types=("falcon",),
        facts={"activation": "gelu", "position_embedding_type": "rope"},
        rules=_FUSED,
        read=_falcon,
        lacks=("attn_qkv.bias", "attn_output.bias", "ffn_up.bias", "ffn_down.bias"),
        tolerance=_GELU,
    ),
    Architecture(name="gemma", types=("gemma",), rules=_ONE_MORE, read=_gemma, lacks=_NO_OUTPUT_BIAS, tolerance=_GELU),
    Architecture(
        name="gemma2",
        types=("gemma2",),
        keys=("attn_logit_softcapping", "final_logit_softcapping"),
        period=2,
        rules=_ONE_MORE,
        read=_gemma_of(46, {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
        lacks=_NO_OUTPUT_BIAS,
        tolerance=_GELU,
    ),
    Architecture(
        name="gemma3",
        types=("gemma3_text",),
        keys=("final_logit_softcapping",),
        period=6,
        rules=_ONE_MORE,
        read=_gemma_of(62, {}),
        lacks=_NO_OUTPUT_BIAS,
        tolerance=_GELU,
    ),
    Architecture(name="phi2", types=("phi",), facts={"activation": "gelu_tanh"}, refuse=_narrow, tolerance=_GELU),
    Architecture(name="phi3", types=("phi3",), refuse=_narrow),
    Architecture(
        name="starcoder2",
        types=("starcoder2",),
        facts={"activation": "gelu_tanh"},
        needs=("blk.0.attn_output.bias",),
        tolerance=_GELU,
    ),
    Architecture(name="stablelm", types=("stablelm",), read=_stablelm, has_output=True),
    Architecture(
        name="nemotron",
        types=("nemotron",),
        facts={"activation": "squared_relu"},
        rules=_ONE_MORE,
        refuse=_narrow,
        has_output=True,
    ),
    Architecture(
        name="command-r",
        types=("cohere",),
        facts={"rotary_interleaved": True},
        keys=("logit_scale",),
        read=_per_head,
        refuse=_command_r,
    ),
    Architecture(name="olmo", types=("olmo",), keys=("attention.clamp_kqv",), rules=_TURNED, lacks=_NO_OUTPUT_BIAS),
    Architecture(
        name="olmo2",
        types=("olmo2", "olmo3"),
        period=4,
        read=_olmo2,
        lacks=_NO_OUTPUT_BIAS,
        refuse=_narrow,
        has_output=True,
    ),
    Architecture(name="olmoe", types=("olmoe",), expert_facts={"moe_router_pre_softmax": True}, refuse=_ungrouped),
    Architecture(
        name="granite",
        types=("granite",),
        rules=_TURNED,
        keys=("attention.scale", "embedding_scale", "residual_scale"),
        write=lambda model, groups: {"logit_scale": 1 / model.logits_multiplier},
        read=lambda keys, tensors: {"logits_multiplier": 1 / keys.get("logit_scale", 1.0)},
    ),
    Architecture(
        name="qwen2moe",
        types=("qwen2_moe",),
        keys=("expert_feed_forward_length", "expert_shared_feed_forward_length"),
        expert_facts={"moe_shared_expert_gate": True, "moe_router_pre_softmax": True},
    ),
    Architecture(name="qwen3moe", types=("qwen3_moe",), keys=("expert_feed_forward_length",), lacks=_NO_OUTPUT_BIAS),
    DEEPSEEK,
    *HYBRIDS,
    QWEN3_NEXT,
    GPT_OSS,
    Architecture(name="smollm3", types=("smollm3",), rules=_TURNED, facts={"no_rope_freq": "4"}),
    Architecture(name="glm4", types=("glm4",), facts={"rotary_interleaved": True}),
    Architecture(name="chatglm", types=("glm",), facts={"rotary_interleaved": True}),
)
"""All that are written and read."""
