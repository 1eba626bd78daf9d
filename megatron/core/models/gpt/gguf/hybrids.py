"""Mamba-2, Nemotron-H, Granite 4 and Bamba as llama.cpp computes them: which layers have what, and their sizes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.config.hybrid import HybridConfig
from megatron.config.hybrid_pattern import ATTENTION, EXPERTS, MAMBA, MLP
from megatron.config.mamba import MambaConfig
from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.core.conversion.gguf.architecture import Architecture, Metadata
from megatron.core.conversion.gguf.transforms import COLUMN, CONVOLUTION, MINUS_EXP, NEIGHBOURS, Division, Rule
from megatron.core.conversion.transforms import Transform
from megatron.core.models.gpt.gguf.settings import by_layer, only_one
from megatron.core.models.gpt.huggingface.hybrid_parts import expert_layers_of

_KV_HEADS, _WIDTHS = "attention.head_count_kv", "feed_forward_length"
_SHARED_WIDTH = "expert_shared_feed_forward_length"
_LEAST_STEP = 1e-3
"""The least time step of published Nemotron-H, which steps of a trained model hardly reach."""
_HAS_ROTARY = "rope.scaling.finetuned"
_SIGMOID = 2  # ``expert_gating_func``


def _by_group(groups: int) -> Transform:
    """The weights of a norm over the channels of each group: ``[channels]`` there, ``[groups, channels]`` in a file."""

    def join(parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
        return parts[0].reshape(groups, -1)

    return Transform(join, lambda tensor, model: [tensor.flatten()])


def _halves(parts: Sequence[Tensor], dim: int) -> Tensor:
    return torch.cat(list(parts), dim)


def _stacked_halves(dim: int) -> Transform:
    """Gates above values there, and a tensor of each in a file."""

    def split(tensor: Tensor, model: ModelConfig) -> list[Tensor]:
        return [half.contiguous() for half in tensor.chunk(2, dim)]

    return Transform(lambda parts, model: _halves(parts, dim), split)


def _mixer_rules(module: str, *others: Rule) -> Callable[[Sequence[object]], Sequence[Rule]]:
    """How tensors of Mamba-2 layers differ from those of ``module`` there."""
    own = [(("A_log",), MINUS_EXP), ((f"{module}.D",), COLUMN), (("conv1d.weight",), CONVOLUTION)]

    def rules(groups: Sequence[object]) -> Sequence[Rule]:
        norm = Rule((f"{module}.norm.weight",), _by_group(MambaConfig.among(groups).mamba_num_groups))
        return [*(Rule(ends, transform) for ends, transform in own), norm, *others]

    return rules


_STEPS = Division("dt_bias", ("dt_proj.bias",))


def _written_mamba(model: ModelConfig, groups: Sequence[object]) -> dict[str, Any]:
    mamba = MambaConfig.among(groups)
    return {
        "ssm.conv_kernel": mamba.mamba_conv_kernel_dim,
        "ssm.inner_size": mamba.inner_size(model),
        "ssm.state_size": mamba.mamba_state_dim,
        "ssm.time_step_rank": mamba.num_heads(model),
        "ssm.group_count": mamba.mamba_num_groups,
    }


def _mamba(keys: Metadata) -> MambaConfig:
    heads, inner = keys["ssm.time_step_rank"], keys["ssm.inner_size"]
    return MambaConfig(
        mamba_state_dim=keys["ssm.state_size"],
        mamba_head_dim=inner // heads,
        mamba_num_groups=keys["ssm.group_count"],
        mamba_num_heads=None if inner == 2 * keys["embedding_length"] else heads,
        mamba_conv_kernel_dim=keys["ssm.conv_kernel"],
    )


def _groups(keys: Metadata, tensors: Collection[str], *, letters: Callable[[Metadata], str]) -> Sequence[object]:
    return HybridConfig(hybrid_layer_pattern=letters(keys)), _mamba(keys)


def _sizes(keys: Metadata) -> dict[str, Any]:
    """Fields of a hybrid's attention and networks, of which some layers have none."""
    shared, width = only_one(keys, _KV_HEADS), only_one(keys, _WIDTHS)
    return {
        "num_query_groups": shared or keys["attention.head_count"],
        "ffn_hidden_size": width or keys["embedding_length"],
    }


# Mamba-2


def _write_mamba2(model: ModelConfig, groups: Sequence[object]) -> Metadata:
    nothing = dict.fromkeys(("attention.head_count", _KV_HEADS, _WIDTHS), 0)
    widths = dict.fromkeys(("attention.key_length", "attention.value_length"))
    return {**_written_mamba(model, groups), **nothing, **widths}


def _read_mamba2(keys: Metadata, tensors: Collection[str]) -> Mapping[str, Any]:
    width = keys["embedding_length"]
    none = {"num_attention_heads": 1, "num_query_groups": 1, "kv_channels": width, "ffn_hidden_size": width}
    return {**none, "max_position_embeddings": 1 << 20}


MAMBA2 = Architecture(
    name="mamba2",
    types=("mamba2",),
    rules=_mixer_rules("mixer"),
    divisions=lambda groups: (_STEPS,),
    write=_write_mamba2,
    read=_read_mamba2,
    groups=partial(_groups, letters=lambda keys: MAMBA * keys["block_count"]),
    unread=("ffn_hidden_size", "num_attention_heads", "kv_channels", "num_query_groups", "activation"),
)


# Nemotron-H


def _nemotron_letters(keys: Metadata) -> str:
    shared, widths = by_layer(keys, _KV_HEADS), by_layer(keys, _WIDTHS)
    network = EXPERTS if keys.get("expert_count") else MLP
    return "".join(ATTENTION if one else network if width else MAMBA for one, width in zip(shared, widths))


def _write_nemotron(model: ModelConfig, groups: Sequence[object]) -> Metadata:
    letters, moe = HybridConfig.among(groups).letters, MoEConfig.among(groups)
    width = moe.moe_ffn_hidden_size if moe.has_experts else model.ffn_hidden_size
    found: dict[str, Any] = {
        **_written_mamba(model, groups),
        "attention.layer_norm_epsilon": model.norm_epsilon,  # which nothing is computed with
        _KV_HEADS: [model.num_query_groups if each == ATTENTION else 0 for each in letters],
        _WIDTHS: [width if each in (MLP, EXPERTS) else 0 for each in letters],
    }
    if moe.has_experts:
        scaling = {"expert_weights_scale": moe.moe_router_topk_scaling_factor or 1.0, "expert_shared_count": 1}
        found |= {"expert_weights_norm": moe.moe_router_topk > 1, "expert_gating_func": _SIGMOID, **scaling}
    return found


def _read_nemotron(keys: Metadata, tensors: Collection[str]) -> Mapping[str, Any]:
    return {**_sizes(keys), "add_mlp_bias": any(name.endswith("ffn_up.bias") for name in tensors)}


def _read_nemotron_experts(keys: Metadata, tensors: Collection[str]) -> Mapping[str, Any]:
    scale = keys.get("expert_weights_scale", 1.0)
    return {
        **({"moe_router_group_score": "top2"} if keys.get("expert_group_count") else {}),
        "moe_layer_freq": expert_layers_of(_nemotron_letters(keys)),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": None if scale == 1.0 else scale,
    }


def _without_least_step(model: ModelConfig, groups: tuple[object, ...]) -> tuple[ModelConfig, tuple[object, ...]]:
    """The groups without a least time step that steps hardly reach: llama.cpp has none."""
    limits = MambaConfig.among(groups).mamba_time_step_limits
    if limits is None or limits[0] > _LEAST_STEP or limits[1] < math.sqrt(1e30):
        return model, groups
    free = [
        dataclasses.replace(each, mamba_time_step_limits=None) if isinstance(each, MambaConfig) else each
        for each in groups
    ]
    return model, tuple(free)


_NEMOTRON: dict[str, Any] = {
    "types": ("nemotron_h",),
    "facts": {"activation": "squared_relu"},
    "rules": _mixer_rules("mixer"),
    "divisions": lambda groups: (_STEPS,),
    "write": _write_nemotron,
    "read": _read_nemotron,
    "groups": partial(_groups, letters=_nemotron_letters),
    "computed": _without_least_step,
    "difference": "llama.cpp has no least time step of Mamba-2, which is 0.001 or less here",
}
NEMOTRON_H = Architecture(name="nemotron_h", fits=lambda groups: not MoEConfig.among(groups).has_experts, **_NEMOTRON)
NEMOTRON_H_MOE = Architecture(
    name="nemotron_h_moe",
    fits=lambda groups: MoEConfig.among(groups).has_experts,
    aliases={"backbone.layers": "model.layers", ".mixer.experts.": ".mlp.experts."},
    keys=("expert_feed_forward_length", _SHARED_WIDTH, "expert_group_count", "expert_group_used_count"),
    read_experts=_read_nemotron_experts,
    unread=("ffn_hidden_size",),  # of networks without experts, of which there are none
    **_NEMOTRON,
)


# Granite 4 and Bamba


def _granite_letters(keys: Metadata) -> str:
    network = EXPERTS if keys.get("expert_count") else MLP
    return "".join(f"{ATTENTION if shared else MAMBA}{network}" for shared in by_layer(keys, _KV_HEADS))


def _granite_divisions(groups: Sequence[object]) -> Sequence[Division]:
    gates = tuple(f"mlp.{name}.weight" for name in ("gate_proj", "up_proj"))
    if not MoEConfig.among(groups).has_experts:
        return (
            _STEPS,
            Division("shared_mlp.input_linear.weight", gates, _stacked_halves(0)),
            Division("shared_mlp.output_linear.weight", ("mlp.down_proj.weight",)),
        )
    shared, experts = (
        tuple(each.replace("mlp.", f"mlp.{of}.") for each in gates) for of in ("shared_expert", "experts")
    )
    return (
        _STEPS,
        Division("shared_mlp.input_linear.weight", shared, _stacked_halves(0)),
        Division("shared_mlp.output_linear.weight", ("mlp.shared_expert.down_proj.weight",)),
        Division("block_sparse_moe.input_linear.weight", experts, _stacked_halves(1)),
        Division("block_sparse_moe.output_linear.weight", ("mlp.experts.down_proj.weight",)),
    )


def _write_granite(model: ModelConfig, groups: Sequence[object]) -> Metadata:
    mixers, moe = HybridConfig.among(groups).letters[::2], MoEConfig.among(groups)
    return {
        _WIDTHS: moe.moe_ffn_hidden_size if moe.has_experts else model.ffn_hidden_size,
        **_written_mamba(model, groups),
        "block_count": len(mixers),
        _KV_HEADS: [model.num_query_groups if each == ATTENTION else 0 for each in mixers],
        "logit_scale": 1 / model.logits_multiplier,
        _HAS_ROTARY: model.is_rotary,
        "rope.dimension_count": model.rotary_width if model.is_rotary else model.kv_channels,
    }


def _read_granite(keys: Metadata, tensors: Collection[str]) -> Mapping[str, Any]:
    found: dict[str, Any] = {
        **_sizes(keys),
        "num_layers": 2 * keys["block_count"],
        "logits_multiplier": 1 / keys.get("logit_scale", 1.0),
    }
    if keys.get("expert_count"):
        found["ffn_hidden_size"] = keys[_SHARED_WIDTH]
    if not keys.get(_HAS_ROTARY):
        found |= {"position_embedding_type": "none", "rotary_percent": 1.0, "rotary_base": 10000.0}
    return found


GRANITE_HYBRID = Architecture(
    name="granitehybrid",
    types=("granitemoehybrid", "bamba"),
    facts={"position_embedding_type": "rope"},
    keys=("attention.scale", "embedding_scale", "residual_scale", _SHARED_WIDTH),
    rules=_mixer_rules("mamba", Rule(("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias"), NEIGHBOURS)),
    divisions=_granite_divisions,
    write=_write_granite,
    read=_read_granite,
    read_experts=lambda keys, tensors: {
        "moe_layer_freq": expert_layers_of(_granite_letters(keys)),
        "moe_ffn_hidden_size": only_one(keys, _WIDTHS),
    },
    refuse=lambda model, groups: (
        []
        if MAMBA in HybridConfig.among(groups).letters
        else ["it has no Mamba-2 layers, which this architecture needs"]
    ),
    groups=partial(_groups, letters=_granite_letters),
    unread=("rotary_base", "rotary_percent"),
)
HYBRIDS = (MAMBA2, NEMOTRON_H, NEMOTRON_H_MOE, GRANITE_HYBRID)
"""Architectures whose layers have one mixer, or a mixer and a network, each."""
