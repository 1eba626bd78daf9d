"""The settings of a decoder as keys of a GGUF file, and back."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from megatron.config.layer_patterns import window_pattern
from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.core.conversion.gguf.architecture import Architecture, Metadata
from megatron.core.conversion.gguf.rotary import read_rotary, written_rotary
from megatron.core.conversion.huggingface.formats import format_of
from megatron.core.models.gpt.config import GPTConfig
from megatron.core.models.registry import with_all_groups
from megatron.errors import CheckpointError

_NORMS = {"RMSNorm": "attention.layer_norm_rms_epsilon", "LayerNorm": "attention.layer_norm_epsilon"}
_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_layers",
    "feed_forward_length": "ffn_hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_query_groups",
    "attention.key_length": "kv_channels",
    "vocab_size": "vocab_size",
}
_NEEDED = ("block_count", "embedding_length", "context_length", "attention.head_count")
_OPTIONAL = {
    "attention.scale": "softmax_scale",
    "attention.clamp_kqv": "clip_qkv",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_multiplier",
    "use_parallel_residual": "parallel_attention",
}
"""Keys that some architectures read, and the fields that they hold."""
_OF_EXPERTS = {
    "expert_feed_forward_length": "moe_ffn_hidden_size",
    "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
    "expert_weights_scale": "moe_router_topk_scaling_factor",
    "expert_group_count": "moe_router_num_groups",
    "expert_group_used_count": "moe_router_group_topk",
}
_BIASES = {"add_qkv_bias": "attn_q", "add_attention_output_bias": "attn_output", "add_mlp_bias": "ffn_up"}
_WINDOW, _PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"


def written_settings(model: ModelConfig, groups: Sequence[object], architecture: Architecture) -> dict[str, Any]:
    """Keys of a model, without its architecture's name in front; those that it leaves to its readers are missing."""
    found: dict[str, Any] = {key: getattr(model, field) for key, field in _SIZES.items()}
    found["attention.value_length"] = model.kv_channels
    found[_NORMS[model.normalization]] = model.norm_epsilon
    if model.is_rotary:
        found |= written_rotary(model)
    experts = MoEConfig.among(groups)
    if experts.has_experts:
        found |= {"expert_count": experts.num_experts, "expert_used_count": experts.moe_router_topk}
    for names, settings in ((_OPTIONAL, model), (_OF_EXPERTS, experts)):
        values = {key: getattr(settings, names[key]) for key in architecture.keys if key in names}
        found |= {key: value for key, value in values.items() if value is not None}
    if architecture.period is not None and model.window_size is not None:
        found[_WINDOW] = model.window_size[0] + 1
        pattern = model.window_attn_skip_freq or "0"
        found |= {_PATTERN: int(pattern)} if pattern.isdigit() else {}
    found |= architecture.write(model, groups)
    return {key: value for key, value in found.items() if value is not None}


def read_settings(
    keys: Metadata, tensors: Collection[str], architecture: Architecture
) -> tuple[ModelConfig, tuple[object, ...]]:
    """The settings of a model and of its family's groups; CheckpointError for keys that are missing.

    ``tensors``: names of all, which say what layers have.
    """
    model_type = architecture.types[0]
    published = format_of(model_type)
    assert published is not None, "types of architectures are known"
    described = published.types[model_type]
    found: dict[str, Any] = {**described.merged("fixed"), **architecture.facts}
    if described.activations and "activation" not in found:
        found["activation"] = next(iter(described.activations.values()))
    for key in _NEEDED:
        if key not in keys:
            raise CheckpointError(f"a file of a model has the key {architecture.name}.{key}, and it is missing")
    for key, field in _SIZES.items():
        if key in keys:
            found[field] = only_one(keys, key) if isinstance(keys[key], list) else keys[key]
    found["norm_epsilon"] = next((keys[key] for key in _NORMS.values() if key in keys), found.get("norm_epsilon", 1e-5))
    found |= _by_tensors(tensors)
    if found.get("position_embedding_type") == "rope":
        found |= read_rotary(keys, found)
    found |= {field: keys[key] for key, field in _OPTIONAL.items() if key in architecture.keys and key in keys}
    if keys.get(_WINDOW) and architecture.period is not None:
        period = keys.get(_PATTERN, architecture.period)
        layers = _windows(period, found["num_layers"])
        found |= {"window_size": (keys[_WINDOW] - 1, 0), "window_attn_skip_freq": window_pattern(layers)}
    else:
        found.pop("rotary_base_local", None)
    found |= architecture.read(keys, tensors)
    groups: list[object] = [GPTConfig()]
    if keys.get("expert_count"):
        held = {field: keys[key] for key, field in _OF_EXPERTS.items() if key in architecture.keys and key in keys}
        held.setdefault("moe_ffn_hidden_size", found.get("ffn_hidden_size"))
        sizes = {"num_experts": keys["expert_count"], "moe_router_topk": keys["expert_used_count"]}
        own = {**architecture.expert_facts, **architecture.read_experts(keys, tensors)}
        groups.append(MoEConfig(**{**sizes, **held, **own}))
    groups += architecture.groups(keys, tensors)
    found.pop("group_query_attention", None)
    heads = found.get("num_attention_heads")
    shared = found.get("num_query_groups") not in (None, heads)
    try:
        return ModelConfig(**found, group_query_attention=shared), with_all_groups(groups)
    except TypeError as error:
        raise CheckpointError(f"its keys don't describe a {architecture.name} model: {error}") from None


def by_layer(keys: Metadata, key: str) -> list[int]:
    """A number for each layer of a file; CheckpointError for a list of another length."""
    layers, value = keys["block_count"], keys.get(key, 0)
    found = list(value) if isinstance(value, list) else [value] * layers
    if len(found) != layers:
        raise CheckpointError(f"{key} has {len(found)} entries for {layers} layers")
    return found


def only_one(keys: Metadata, key: str) -> int | None:
    """The number of all layers that have one; None where no layer has."""
    found = {*by_layer(keys, key)} - {0}
    if len(found) > 1:
        raise CheckpointError(f"{key} differs between layers: {sorted(found)[:4]}; one size for all is read")
    return next(iter(found), None)


def _windows(pattern: int | Sequence[bool], num_layers: int) -> tuple[bool, ...]:
    """Which layers have a window: all but each ``pattern``-th (0: all), or those that a list marks, as llama.cpp's own
    converter writes it.
    """
    if isinstance(pattern, int):
        return tuple(not pattern or (number + 1) % pattern != 0 for number in range(num_layers))
    if len(pattern) != num_layers:
        raise CheckpointError(f"{_PATTERN} has {len(pattern)} entries for {num_layers} layers")
    return tuple(pattern)


def _by_tensors(tensors: Collection[str]) -> dict[str, Any]:
    """What layers have, by the names of their tensors."""
    found: dict[str, Any] = {
        field: any(name.endswith((f".{layer}.bias", f".{layer}kv.bias")) for name in tensors)
        for field, layer in _BIASES.items()
    }
    return {
        **found,
        "add_bias_linear": all(found.values()),
        "add_output_layer_bias": "output.bias" in tensors,
        "untie_embeddings_and_output_weights": "output.weight" in tensors,
        "qk_layernorm": any(name.endswith(".attn_q_norm.weight") for name in tensors),
    }
