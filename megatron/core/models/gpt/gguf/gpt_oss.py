"""gpt-oss as llama.cpp computes it: attention sinks, windows in every second layer, clamped experts with biases."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.core.conversion.gguf.architecture import Architecture, Metadata
from megatron.core.conversion.gguf.transforms import Division
from megatron.core.conversion.transforms import Transform

_CLAMP = 7.0  # in llama.cpp's code


def _divided(tensor: Tensor, model: ModelConfig) -> list[Tensor]:
    """Gates and values, ``[E, f, h]`` or ``[E, f]`` each, of neighbours ``[E, h, 2f]`` or ``[E, 2f]``."""
    parts = [tensor[..., first::2] for first in (0, 1)]
    return [(part.transpose(1, 2) if tensor.dim() == 3 else part).contiguous() for part in parts]


def _together(parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
    turned = [part.transpose(1, 2) if part.dim() == 3 else part for part in parts]
    return torch.stack(turned, -1).flatten(-2)


_NEIGHBOURS = Transform(_together, _divided)
_OUTPUTS_FIRST = Transform(
    lambda parts, model: parts[0].transpose(1, 2).contiguous(),
    lambda tensor, model: [tensor.transpose(1, 2).contiguous()],
)


def _as_run(model: ModelConfig, groups: tuple[object, ...]) -> tuple[ModelConfig, tuple[object, ...]]:
    """With the ends of YaRN's ramp as whole dimensions, which llama.cpp makes of all."""
    return dataclasses.replace(model, yarn_correction_range_round_to_int=True), groups


def _read(keys: Metadata, tensors: Collection[str]) -> Mapping[str, Any]:
    biases = dict.fromkeys(("add_qkv_bias", "add_attention_output_bias", "add_mlp_bias", "add_bias_linear"), True)
    return {**biases, "rotary_base_local": None}


GPT_OSS = Architecture(
    name="gpt-oss",
    types=("gpt_oss",),
    facts={"activation_func_clamp_value": _CLAMP, "yarn_correction_range_round_to_int": False},
    keys=("expert_feed_forward_length",),
    period=2,
    read=_read,
    divisions=lambda groups: (
        Division("self_attn.sinks", ("self_attn.sinks.weight",)),
        Division("experts.gate_up_proj", ("experts.gate_proj.weight", "experts.up_proj.weight"), _NEIGHBOURS),
        Division("experts.gate_up_proj_bias", ("experts.gate_proj.bias", "experts.up_proj.bias"), _NEIGHBOURS),
        Division("experts.down_proj", ("experts.down_proj.weight",), _OUTPUTS_FIRST),
        Division("experts.down_proj_bias", ("experts.down_proj.bias",)),
    ),
    refuse=lambda model, groups: [] if model.window_size else ["it has no layers with a window (--window-size)"],
    as_run=_as_run,
    difference="llama.cpp rounds the ends of YaRN's ramp to whole dimensions, which changes positions a little",
    unread=("yarn_correction_range_round_to_int",),
)
