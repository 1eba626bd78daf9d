"""Gated delta nets in checkpoints of Megatron-LM, in place of attention or as layers of a hybrid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from megatron.config.hybrid import HybridConfig
from megatron.config.hybrid_pattern import DELTA_NET
from megatron.config.layer_patterns import listed_layers, window_layers
from megatron.config.linear_attention import GatedDeltaNetConfig
from megatron.config.model import ModelConfig
from megatron.core.conversion.bounds import Count, Heads, Width
from megatron.core.conversion.megatron_lm.known_arguments import has_delta_nets
from megatron.core.conversion.megatron_lm.saved_arguments import Arguments
from megatron.core.conversion.portable import LazyTensor
from megatron.errors import CheckpointError

_VARIANT: Final = "gated_delta_net"
_SIZES: dict[str, Any] = {
    "linear_conv_kernel_dim": Count,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), Width),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), Heads),
}
KINDS: dict[str, Any] = {**_SIZES, **dict.fromkeys(("experimental_attention_variant", "linear_attention_type"), str)}
"""Types and bounds of the saved arguments of gated delta nets."""
_NORM = ".self_attention.out_norm.weight"


def check(args: Arguments) -> None:
    """Raise CheckpointError for nets that compute something else there than here: their convolution and gate have the
    activation of the MLPs, and their norm is of the kind of the others.
    """
    if not has_delta_nets(args.values):
        return
    wrong = []
    if not args("swiglu", False) or args("quick_geglu", False):
        wrong.append("are activated by another function than SiLU, which --swiglu asks for")
    if args("normalization", "LayerNorm") != "RMSNorm":
        wrong.append("have another norm than RMSNorm")
    if wrong:
        raise CheckpointError(f"{args.where} is a model with gated delta nets that {' and '.join(wrong)}")


def read(args: Arguments, model: ModelConfig, hybrid: HybridConfig) -> GatedDeltaNetConfig:
    """The nets of a model, which a hybrid's pattern has letters for; CheckpointError where they don't fit."""
    if not has_delta_nets(args.values) or (hybrid.is_hybrid and DELTA_NET not in hybrid.all_letters):
        return GatedDeltaNetConfig()
    found = {name: value for name in _SIZES if (value := args(name, None)) is not None}
    marked = tuple(letter == DELTA_NET for letter in hybrid.letters) or _marked(args, model.num_layers)
    part = GatedDeltaNetConfig(
        experimental_attention_variant=_VARIANT, linear_attention_freq=listed_layers(marked), **found
    )
    keys, values = part.linear_num_key_heads, part.linear_num_value_heads
    if values % keys:
        raise CheckpointError(
            f"{args.where}: its saved settings say linear_num_value_heads {values}, which is not divisible by "
            f"linear_num_key_heads {keys}"
        )
    return part.resolved(model, (model.num_layers,))


def _marked(args: Arguments, num_layers: int) -> tuple[bool, ...]:
    """Which layers have linear attention."""
    given = args("linear_attention_freq", None)
    if type(given) is int and given > 0:
        return window_layers(str(given), num_layers)
    if isinstance(given, list) and len(given) == num_layers and {*given} <= {0, 1}:
        return tuple(map(bool, given))
    raise CheckpointError(
        f"{args.where}: its saved settings: linear_attention_freq is {str(given)[:60]}; expected a number of layers, "
        f"or a list of 0 and 1 for {num_layers} layers"
    )


def unsupported(model: ModelConfig, groups: Sequence[object]) -> dict[str, bool]:
    """What no gated delta net of Megatron-LM's has, and whether this model's have it."""
    part = GatedDeltaNetConfig.among(groups)
    if not part.has_delta_nets:
        return {}
    return {
        "gated delta nets with SiLU and RMSNorm only (--swiglu, --normalization RMSNorm)": (
            model.activation != "swiglu" or model.normalization != "RMSNorm"
        ),
        "no write strengths up to 2 (--linear-negative-eigenvalues)": part.linear_negative_eigenvalues,
        "one epsilon for all norms (--linear-norm-epsilon)": (
            part.linear_norm_epsilon not in (None, model.norm_epsilon)
        ),
        "one placement for all norms (--linear-norm-placement)": (
            part.linear_norm_placement not in (None, model.norm_placement)
        ),
    }


def arguments(groups: Sequence[object]) -> dict[str, Any]:
    """The arguments of the nets, whose pattern is resolved; none for other models."""
    part = GatedDeltaNetConfig.among(groups)
    if not part.has_delta_nets:
        return {}
    sizes = {name: getattr(part, name) for name in _SIZES}
    if HybridConfig.among(groups).is_hybrid:
        return sizes
    pattern = part.linear_attention_freq or ""
    frequency = int(pattern) if pattern.isdecimal() else [int(each) for each in pattern.strip("[]").split(",")]
    return {**sizes, "experimental_attention_variant": _VARIANT, "linear_attention_freq": frequency}


def flags(groups: Sequence[object]) -> dict[str, Any]:
    """Flags that a training run there needs beside --use-checkpoint-args, sizes that are the defaults aside."""
    usual = GatedDeltaNetConfig()
    return {name: value for name, value in arguments(groups).items() if value != getattr(usual, name)}


def with_norms(tensors: Mapping[str, LazyTensor], model: ModelConfig, *, added: float) -> dict[str, LazyTensor]:
    """The tensors, with ``added`` to norms of value heads where the other norms are 1 + weight: theirs are, too, and
    ours never. In fp32 or wider, since the sums of most numbers don't fit into 16 bits.
    """
    if not model.apply_layernorm_1p:
        return dict(tensors)
    return {name: _moved(each, added) if name.endswith(_NORM) else each for name, each in tensors.items()}


def _moved(tensor: LazyTensor, added: float) -> LazyTensor:
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return LazyTensor(tensor.shape, wide, partial(_sum, tensor, wide, added))


def _sum(tensor: LazyTensor, wide: torch.dtype, added: float) -> Tensor:
    return tensor.make().to(wide) + added
