"""Published types with gated delta nets: Qwen3-Next, whose other layers have gated attention."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from megatron.config.layer_patterns import listed_layers, window_pattern
from megatron.config.linear_attention import GatedDeltaNetConfig
from megatron.config.model import ModelConfig
from megatron.core.checkpointing.manifest import listed
from megatron.core.conversion.bounds import Count, Heads, Width
from megatron.core.conversion.huggingface.biases import attention_biases
from megatron.core.conversion.huggingface.config_reader import ConfigReader
from megatron.core.conversion.huggingface.format import ModelType
from megatron.core.conversion.huggingface.parts import PublishedPart
from megatron.core.conversion.huggingface.rotary import partial_rotary
from megatron.core.conversion.tables import Row
from megatron.core.conversion.transforms import Transform
from megatron.core.models.gpt.huggingface.deepseek import LATER, mtp_layer
from megatron.core.models.gpt.huggingface.llama import OURS, THEIRS, like_llama
from megatron.core.models.gpt.huggingface.mixtral import QWEN2_MOE
from megatron.errors import CheckpointError

NET_SIZES = (
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads"),
)
"""Sizes of gated delta nets, which have the same names here and there."""
NET_KINDS: dict[str, Any] = {
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), Width),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), Heads),
    **dict.fromkeys(("linear_conv_kernel_dim", "full_attention_interval"), Count),
    "layer_types": list[str],
}
"""Types and bounds of their settings."""
_LATER = "mtp"
_ONE_PROJECTION = "depths of multi-token prediction share one projection there, and here each has its own"
_TYPES = {"linear_attention": True, "full_attention": False}


def linear_layers(reader: ConfigReader, *, interval: int) -> list[bool]:
    """Which layers have linear attention: those of ``layer_types``, else all but every ``interval``-th."""
    layers, types = reader("num_hidden_layers"), reader.get("layer_types")
    if types is None:
        return [(number + 1) % interval != 0 for number in range(layers)]
    if not {*types} <= _TYPES.keys() or len(types) != layers:
        raise reader.refuse("layer_types", f"it must name each of the {layers} layers, as {' or '.join(_TYPES)}")
    return [_TYPES[each] for each in types]


def nets_in(marked: Sequence[bool]) -> dict[str, Any]:
    """Fields of gated delta nets in these layers."""
    pattern = window_pattern(tuple(marked)) or listed_layers(tuple(marked))
    return {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": pattern}


def _read(reader: ConfigReader) -> dict[str, Any]:
    marked = linear_layers(reader, interval=reader("full_attention_interval"))
    return {**nets_in(marked), **{name: reader(name) for name in NET_SIZES}}


def written_nets(part: GatedDeltaNetConfig, model: ModelConfig) -> dict[str, Any]:
    """Sizes, and the kind of each layer."""
    names = {is_linear: name for name, is_linear in _TYPES.items()}
    layers = [names[each] for each in part.linear_layers(model.num_layers)]
    return {"layer_types": layers, **{name: getattr(part, name) for name in NET_SIZES}}


def check_heads(part: GatedDeltaNetConfig, reader: ConfigReader) -> None:
    """Raise CheckpointError for heads that don't fit."""
    keys, values = part.linear_num_key_heads, part.linear_num_value_heads
    if values % keys:
        raise reader.refuse("linear_num_value_heads", f"it is not divisible by the {keys} key heads")


def rearranged(*orders: Tensor) -> Transform:
    """Several tensors whose rows are those of ours that ``orders``, one of each, number."""
    ours = torch.cat(orders).argsort()
    return Transform(
        lambda parts, model: torch.cat(list(parts))[ours],
        lambda tensor, model: [tensor[order] for order in orders],
    )


def _by_key_head(part: GatedDeltaNetConfig) -> Transform:
    """Two matrices with the rows of each key head together, [q, k, v, z] and [beta, alpha]."""
    keys, values, heads = part.key_width, part.value_width, part.linear_num_value_heads
    numbers = torch.arange(2 * keys + 2 * values + 2 * heads)
    components = torch.split(numbers, [keys, keys, values, values, heads, heads])
    by_head = [each.view(part.linear_num_key_heads, -1) for each in components]
    return rearranged(torch.cat(by_head[:4], dim=1).flatten(), torch.cat(by_head[4:], dim=1).flatten())


def head_rows(theirs: str) -> tuple[Row, ...]:
    """Rows of the two numbers of each value head. ``theirs``: the module of the published model."""
    return tuple(
        Row(f"{OURS}.self_attention.{name}", f"{theirs}.{name}", is_parameter=True) for name in ("A_log", "dt_bias")
    )


def _qwen3_next_rows(part: GatedDeltaNetConfig) -> Sequence[Row]:
    ours, theirs = f"{OURS}.self_attention", f"{THEIRS}.linear_attn"
    if not part.has_delta_nets:
        return ()
    return (
        Row(f"{ours}.in_proj", (f"{theirs}.in_proj_qkvz", f"{theirs}.in_proj_ba"), _by_key_head(part)),
        Row(f"{ours}.conv1d", f"{theirs}.conv1d"),
        Row(f"{ours}.out_norm", f"{theirs}.norm"),
        Row(f"{ours}.out_proj", f"{theirs}.out_proj"),
        *head_rows(theirs),
    )


class _Nets(PublishedPart[GatedDeltaNetConfig]):
    @override
    def missing(self, part: GatedDeltaNetConfig, model: ModelConfig) -> Sequence[str]:
        """Multi-token prediction has attention there, and here the kind of the last layer."""
        if not model.mtp_num_layers or not part.linear_layers(model.num_layers)[-1]:
            return ()
        return ("its layer of multi-token prediction has a gated delta net, as the last layer, and not attention",)


def _later_layers(model: ModelConfig, tensors: Collection[str], where: str) -> int:
    """One layer where the files have it, which no setting says; CheckpointError for one that is none of ours."""
    if "mtp.fc.weight" not in tensors:
        return 0
    own, last = (
        {name.removeprefix(before) for name in tensors if name.startswith(before)}
        for before in (f"{_LATER}.layers.0.", f"model.layers.{model.num_layers - 1}.")
    )
    if own == last:
        return 1
    raise CheckpointError(
        f"{where} holds a layer of multi-token prediction with other tensors than the last layer of the model, which "
        f"is not available here: only one of the two has {listed(sorted(own ^ last))}"
    )


def _read_later(reader: ConfigReader) -> dict[str, Any]:
    if (reader.get("num_nextn_predict_layers") or 0) > 1:
        raise reader.refuse("num_nextn_predict_layers", _ONE_PROJECTION)
    return {}


def _later_rows(rows: Sequence[Row], model: ModelConfig, groups: Sequence[object]) -> Sequence[Row]:
    ends = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "final_layernorm": "norm"}
    around = (Row(f"{LATER}.{ours}", f"{_LATER}.{theirs}") for ours, theirs in ends.items())
    return (*mtp_layer(rows, theirs=f"{_LATER}.layers.{{n}}"), *around)


_QWEN3_NEXT_NETS = _Nets(
    group=GatedDeltaNetConfig,
    read=_read,
    write=written_nets,
    rows=_qwen3_next_rows,
    check=check_heads,
)
QWEN3_NEXT = replace(
    like_llama(
        "Qwen3NextForCausalLM",
        attention_biases(),
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "full_attention_interval": 4,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        },
        about="Qwen3-Next, with its layer of multi-token prediction; any layers with gated delta nets; any layers "
        "dense; tied or not",
        example="Qwen/Qwen3-Next-80B-A3B-Instruct",
        qk_layernorm=True,
        apply_layernorm_1p=True,
        attention_output_gate=True,
    ),
    features=(partial_rotary(0.25), attention_biases()),
    kinds={**QWEN2_MOE.kinds, **NET_KINDS, "num_nextn_predict_layers": int},
    by_code=("mtp_num_layers",),
    read=_read_later,
    refuse=lambda model: [_ONE_PROJECTION] if model.mtp_num_layers > 1 else [],
    groups=(*QWEN2_MOE.groups, _QWEN3_NEXT_NETS),
    later_layers=_later_layers,
    later_rows=_later_rows,
)
TYPES: dict[str, ModelType] = {"qwen3_next": QWEN3_NEXT}
