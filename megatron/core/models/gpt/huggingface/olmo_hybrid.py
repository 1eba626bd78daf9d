"""OLMo Hybrid: gated delta nets with norms before their sublayers in most layers, the layers of OLMo 2 between them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.config.linear_attention import GatedDeltaNetConfig
from megatron.config.model import ModelConfig
from megatron.core.conversion.huggingface.biases import attention_biases
from megatron.core.conversion.huggingface.config_reader import ConfigReader
from megatron.core.conversion.huggingface.format import ModelType
from megatron.core.conversion.huggingface.parts import PublishedPart
from megatron.core.conversion.huggingface.rotary import ROTARY, neither_rotary_nor_none
from megatron.core.conversion.portable import LazyTensor
from megatron.core.conversion.tables import Row
from megatron.core.conversion.transforms import Transform
from megatron.core.models.gpt.huggingface.delta_nets import (
    NET_KINDS,
    check_heads,
    head_rows,
    linear_layers,
    nets_in,
    rearranged,
    written_nets,
)
from megatron.core.models.gpt.huggingface.llama import LLAMA, OURS, THEIRS
from megatron.core.models.gpt.huggingface.olmo import OLMO2

_INTERVAL = 4  # one layer of so many has attention, unless layer_types says otherwise
_EPSILON = 1e-5  # of the norm of value heads, whatever rms_norm_eps says
_OTHER_NORMS = {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}
_CONVOLUTION = re.compile(r"(model\.layers\.\d+\.linear_attn\.)(?:[qkv]_)?conv1d\.weight")


def as_released(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """The tensors under the names of the released files, with a convolution each for queries, keys and values.

    transformers holds one convolution in memory, and the files it writes divide that in three nearly equal parts,
    wherever queries end; they also have other names of norms.
    """
    found = dict[str, LazyTensor]()
    for name, tensor in tensors.items():
        *before, module, kind = name.rsplit(".", 2)
        found[".".join((*before, _OTHER_NORMS.get(module, module), kind))] = tensor
    for layer in dict.fromkeys(match[1] for match in map(_CONVOLUTION.fullmatch, tensors) if match):
        names = [f"{layer}{letter}_conv1d.weight" for letter in "qkv"]
        parts = [found[name] for name in (f"{layer}conv1d.weight", *names) if name in found]
        rows = [found[name].shape[0] for name in (f"{layer}{letter}_proj.weight" for letter in "qkv") if name in found]
        alike = {(part.shape[1:], part.dtype) for part in parts}
        if len(rows) != len(names) or len(alike) != 1 or sum(part.shape[0] for part in parts) != sum(rows):
            continue  # reported with all that doesn't fit
        found.pop(f"{layer}conv1d.weight", None)
        for name, (start, end) in zip(names, _borders(rows)):
            shape = (end - start, *parts[0].shape[1:])
            found[name] = LazyTensor(shape, parts[0].dtype, partial(_rows, parts, start, end))
    return found


def _borders(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    for number, each in enumerate(rows):
        start = sum(rows[:number])
        yield start, start + each


def _rows(parts: Sequence[LazyTensor], start: int, end: int) -> Tensor:
    return torch.cat([part.make() for part in parts])[start:end]


def _read_nets(reader: ConfigReader) -> dict[str, Any]:
    keys = reader.get("linear_num_key_heads") or reader("num_attention_heads")
    width = reader.get("linear_key_head_dim") or int(0.75 * reader("hidden_size") / keys)
    marked = linear_layers(reader, interval=_INTERVAL)
    if reader.get("layer_types") is None and all(marked):  # few layers: then the last one has attention
        marked = [*marked[:-1], False]
    if all(marked) or not any(marked):
        raise reader.refuse("layer_types", "transformers' models have layers of both kinds")
    return {
        **nets_in(marked),
        "linear_conv_kernel_dim": reader("linear_conv_kernel_dim"),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": reader.get("linear_num_value_heads") or reader("num_attention_heads"),
        "linear_key_head_dim": width,
        "linear_value_head_dim": reader.get("linear_value_head_dim") or 2 * width,
        "linear_negative_eigenvalues": reader("linear_allow_neg_eigval"),
        "linear_norm_placement": "before",
        "linear_norm_epsilon": _EPSILON,
    }


def _below_each_other(*widths: int) -> Transform:
    """Matrices below each other, each with as many rows as ``widths`` says."""
    return rearranged(*torch.split(torch.arange(sum(widths)), list(widths)))


def _rows_of_nets(part: GatedDeltaNetConfig) -> Sequence[Row]:
    ours, theirs = f"{OURS}.self_attention", f"{THEIRS}.linear_attn"
    keys, values, heads = part.key_width, part.value_width, part.linear_num_value_heads
    projections = tuple(f"{theirs}.{letter}_proj" for letter in "qkvgba")
    convolutions = tuple(f"{theirs}.{letter}_conv1d" for letter in "qkv")
    return (
        Row(f"{ours}.in_proj", projections, _below_each_other(keys, keys, values, values, heads, heads)),
        Row(f"{ours}.conv1d", convolutions, _below_each_other(keys, keys, values)),
        Row(f"{ours}.out_norm", f"{theirs}.o_norm"),
        Row(f"{ours}.out_proj", f"{theirs}.o_proj"),
        *head_rows(theirs),
    )


def _read_rotary_if_any(reader: ConfigReader) -> dict[str, Any]:
    """Rotary positions unless their base is null, as in the released models."""
    rope = reader.within("rope_parameters")
    if rope.get("rope_theta", reader.get("rope_theta")) is None and not reader.get("rope_scaling"):
        return {"position_embedding_type": "none"}
    return {"position_embedding_type": "rope", **ROTARY.read(reader)}


def _written_rotary(model: ModelConfig) -> dict[str, Any]:
    without = {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": None}}
    return ROTARY.write(model) if model.is_rotary else without


_NETS = PublishedPart(
    group=GatedDeltaNetConfig,
    read=_read_nets,
    write=lambda part, model: {
        **written_nets(part, model),
        "linear_allow_neg_eigval": part.linear_negative_eigenvalues,
    },
    rows=_rows_of_nets,
    check=check_heads,
)
OLMO_HYBRID = replace(
    OLMO2,
    architecture="OlmoHybridForCausalLM",
    features=(
        replace(ROTARY, read=_read_rotary_if_any, write=_written_rotary, refuse=neither_rotary_nor_none),
        attention_biases(),
    ),
    defaults={
        **LLAMA.defaults,
        "max_position_embeddings": 65536,
        "linear_conv_kernel_dim": 4,
        "linear_allow_neg_eigval": True,
    },
    kinds={**NET_KINDS, "linear_allow_neg_eigval": bool},
    fixed={name: value for name, value in OLMO2.fixed.items() if name != "position_embedding_type"},
    groups=(_NETS,),
    as_released=as_released,
    idle=("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor"),
    about="OLMo Hybrid; any layers with gated delta nets, the others with attention; rotary positions, scaled as for "
    "llama, or none; tied or not",
    example="allenai/Olmo-Hybrid-7B",
)
TYPES: dict[str, ModelType] = {"olmo_hybrid": OLMO_HYBRID}
