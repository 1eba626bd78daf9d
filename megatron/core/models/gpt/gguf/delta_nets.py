"""Qwen3-Next as llama.cpp computes it: gated delta nets in all layers but each so-manieth, and experts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.config.linear_attention import GatedDeltaNetConfig
from megatron.config.model import ModelConfig
from megatron.core.conversion.gguf.architecture import Architecture, Metadata
from megatron.core.conversion.gguf.transforms import CONVOLUTION, MINUS_EXP_OF_HEADS, PLUS_ONE, Division, Rule
from megatron.core.conversion.transforms import SAME, Transform
from megatron.core.models.gpt.huggingface.delta_nets import nets_in, rearranged
from megatron.core.ops.delta_rule.request import L2_EPS

_INTERVAL, _USUAL_INTERVAL = "full_attention_interval", 4
_RULES = (
    Rule(("linear_attn.norm.weight",), SAME),
    Rule(("norm.weight",), PLUS_ONE),
    Rule(("A_log",), MINUS_EXP_OF_HEADS),
    Rule(("conv1d.weight",), CONVOLUTION),
)


def _projections(groups: Sequence[object]) -> Transform:
    """The rows of each key head, [q, k, v, z], there; all queries, keys and values, and all gates z, in a file."""
    net = GatedDeltaNetConfig.among(groups)
    keys, values = net.key_width, net.value_width
    numbers = torch.arange(2 * keys + 2 * values).view(net.linear_num_key_heads, -1)
    q, k, v, z = (part.flatten() for part in torch.split(numbers, _widths(net), dim=1))
    apart = rearranged(torch.cat([q, k, v]), z)

    def join(parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
        return apart.join(parts, model)

    return Transform(join, apart.split)


def _widths(net: GatedDeltaNetConfig) -> list[int]:
    """Rows of the queries, keys, values and gates of a key head."""
    heads = net.linear_num_key_heads
    return [net.key_width // heads] * 2 + [net.value_width // heads] * 2


def _divisions(groups: Sequence[object]) -> Sequence[Division]:
    parts = tuple(f"linear_attn.in_proj_{name}.weight" for name in ("qkv", "z"))
    return (
        Division("linear_attn.in_proj_qkvz.weight", parts, _projections(groups)),
        Division("linear_attn.dt_bias", ("linear_attn.dt_proj.bias",)),
    )


def _write(model: ModelConfig, groups: Sequence[object]) -> Metadata:
    net = GatedDeltaNetConfig.among(groups)
    marked = net.linear_layers(model.num_layers)
    return {
        _INTERVAL: marked.index(False) + 1 if False in marked else model.num_layers + 1,
        "ssm.conv_kernel": net.linear_conv_kernel_dim,
        "ssm.state_size": net.linear_key_head_dim,
        "ssm.group_count": net.linear_num_key_heads,
        "ssm.time_step_rank": net.linear_num_value_heads,
        "ssm.inner_size": net.value_width,
    }


def _groups(keys: Metadata, tensors: Collection[str]) -> Sequence[object]:
    interval, heads = keys.get(_INTERVAL, _USUAL_INTERVAL), keys["ssm.time_step_rank"]
    net = GatedDeltaNetConfig(
        **nets_in([(number + 1) % interval != 0 for number in range(keys["block_count"])]),
        linear_conv_kernel_dim=keys["ssm.conv_kernel"],
        linear_key_head_dim=keys["ssm.state_size"],
        linear_num_key_heads=keys["ssm.group_count"],
        linear_num_value_heads=heads,
        linear_value_head_dim=keys["ssm.inner_size"] // heads,
    )
    return (net,)


def _refuse(model: ModelConfig, groups: Sequence[object]) -> Sequence[str]:
    net, reasons = GatedDeltaNetConfig.among(groups), list[str]()
    if net.linear_key_head_dim != net.linear_value_head_dim:
        reasons.append(
            f"--linear-key-head-dim is {net.linear_key_head_dim} and not --linear-value-head-dim "
            f"{net.linear_value_head_dim}"
        )
    if model.norm_epsilon != L2_EPS:  # it has one epsilon for both
        reasons.append(f"--norm-epsilon is {model.norm_epsilon} and not {L2_EPS}, that of queries and keys")
    return reasons


def _read(keys: Metadata, tensors: Collection[str]) -> Mapping[str, Any]:
    return {"attention_output_gate": True}


QWEN3_NEXT = Architecture(
    name="qwen3next",
    types=("qwen3_next",),
    keys=("expert_feed_forward_length", "expert_shared_feed_forward_length"),
    rules=lambda groups: _RULES,
    divisions=_divisions,
    write=_write,
    read=_read,
    groups=_groups,
    expert_facts={"moe_shared_expert_gate": True},
    lacks=("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias"),
    refuse=_refuse,
)
