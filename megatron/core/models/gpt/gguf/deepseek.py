"""DeepSeek-V2 and V3 as llama.cpp's deepseek2: latent attention, and experts after dense layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.core.conversion.gguf.architecture import Architecture, Metadata
from megatron.core.models.gpt.huggingface.experts import expert_layers

_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
_SOFTMAX, _SIGMOID = 1, 2
"""``expert_gating_func``."""
_WITHOUT_LATENT_QUERIES = (26, 27)
"""Numbers of layers by which llama.cpp tells models whose queries have no latents, as V2 Lite's."""


def _write(model: ModelConfig, groups: Sequence[object]) -> Metadata:
    found: dict[str, Any] = {
        "attention.kv_lora_rank": model.kv_lora_rank,
        "attention.value_length": model.v_head_dim,
        "rope.dimension_count": model.qk_pos_emb_head_dim,
    }
    if model.q_lora_rank is not None:
        found["attention.q_lora_rank"] = model.q_lora_rank
    if model.position_embedding_type == "yarn":
        # llama.cpp takes YaRN's factor out of cosine and sine, and multiplies the scores by that of this number.
        found |= {_LOG_MULTIPLIER: 0.1 * model.mscale_all_dim, "rope.scaling.attn_factor": 1.0}
    moe = MoEConfig.among(groups)
    if moe.has_experts:
        marked = moe.expert_layers(model.num_layers)
        is_sigmoid = moe.moe_router_score_function == "sigmoid"
        found |= {
            "leading_dense_block_count": marked.index(True) if any(marked) else len(marked),
            "expert_shared_count": (moe.moe_shared_expert_intermediate_size or 0) // moe.moe_ffn_hidden_size,
            "expert_gating_func": _SIGMOID if is_sigmoid else _SOFTMAX,
            "expert_weights_norm": is_sigmoid and moe.moe_router_topk > 1,
        }
    return found


def _read(keys: Metadata, tensors: Collection[str]) -> Mapping[str, Any]:
    turned = keys["rope.dimension_count"]
    found: dict[str, Any] = {
        "qk_head_dim": keys["attention.key_length"] - turned,
        "qk_pos_emb_head_dim": turned,
        "v_head_dim": keys["attention.value_length"],
        "kv_lora_rank": keys["attention.kv_lora_rank"],
        "q_lora_rank": keys.get("attention.q_lora_rank"),
        "qk_layernorm": True,
        "rotary_percent": 1.0,
    }
    if keys.get("rope.scaling.type") == "yarn":
        scale = 10 * float(keys.get(_LOG_MULTIPLIER, 0.0))
        found |= {"mscale": scale or 1.0, "mscale_all_dim": scale, "rotary_attention_factor": None}
    return found


def _read_experts(keys: Metadata, tensors: Collection[str]) -> Mapping[str, Any]:
    dense, layers = keys.get("leading_dense_block_count", 0), keys["block_count"]
    is_sigmoid = keys.get("expert_gating_func", _SOFTMAX) == _SIGMOID
    groups, used = keys.get("expert_group_count"), keys.get("expert_group_used_count")
    found: dict[str, Any] = {
        "moe_layer_freq": expert_layers([layer >= dense for layer in range(layers)]),
        "moe_shared_expert_intermediate_size": keys.get("expert_shared_count", 0) * keys["expert_feed_forward_length"]
        or None,
        "moe_router_score_function": "sigmoid" if is_sigmoid else "softmax",
        "moe_router_pre_softmax": not is_sigmoid,
        "moe_router_enable_expert_bias": any(name.endswith("exp_probs_b.bias") for name in tensors),
    }
    if groups and used:
        found["moe_router_group_score"] = "sum" if keys["expert_used_count"] == 2 * used else "top2"
    return found


def _refuse(model: ModelConfig, groups: Sequence[object]) -> Sequence[str]:
    reasons = []
    has_latents = model.q_lora_rank is not None
    if has_latents == (model.num_layers in _WITHOUT_LATENT_QUERIES):
        given = f"--q-lora-rank {model.q_lora_rank}" if has_latents else "no --q-lora-rank"
        other = "without" if has_latents else "with"
        reasons.append(f"it has {given}, and llama.cpp takes a model of {model.num_layers} layers for one {other} it")
    if model.position_embedding_type == "yarn" and not model.mscale_all_dim:
        reasons.append("YaRN without mscale_all_dim")
    return reasons


DEEPSEEK = Architecture(
    name="deepseek2",
    types=("deepseek_v2", "deepseek_v3"),
    facts={"rotary_interleaved": True},
    keys=("expert_feed_forward_length", "expert_weights_scale", "expert_group_count", "expert_group_used_count"),
    write=_write,
    read=_read,
    read_experts=_read_experts,
    refuse=_refuse,
    lacks=("attn_q.bias", "attn_q_a.bias", "attn_kv_a_mqa.bias", "attn_output.bias"),
)
