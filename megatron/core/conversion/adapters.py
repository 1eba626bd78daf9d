"""Low-rank adapters on their way to formats that have none: what they add becomes part of the weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from megatron.config.lora import LoraConfig, is_adapter, without_adapters
from megatron.core.conversion.portable import LazyTensor, PortableModel, parameters_of
from megatron.core.parallel.matrices import LogicalMatrix
from megatron.core.parallel.sharding import Sharding
from megatron.core.tensor_parallel.low_rank import matrices_of


def merged(portable: PortableModel) -> PortableModel:
    """The model without adapters that computes the same: each weight is W + scale·b·a, added in fp32 or wider and
    rounded once to the weight's type. A model without adapters is returned as it is.
    """
    lora = LoraConfig.among(portable.groups)
    if not lora.is_on:
        return portable
    layouts = parameters_of(portable.model, portable.groups)
    found = {name: tensor for name, tensor in portable.tensors.items() if not is_adapter(name)}
    for name, tensor in found.items():
        module = name.removesuffix(".weight")
        pairs = {
            each.removeprefix(f"{module}.lora.").removesuffix(".a.weight"): (
                portable.tensors[each],
                portable.tensors[each.removesuffix(".a.weight") + ".b.weight"],
            )
            for each in portable.tensors
            if each.startswith(f"{module}.lora.") and each.endswith(".a.weight")
        }
        if pairs:
            make = partial(_added, tensor, pairs, layouts[name], lora.scale)
            found[name] = dataclasses.replace(tensor, make=make)
    groups = without_adapters(portable.groups)
    return dataclasses.replace(portable, tensors=found, groups=groups, quantization=None)


def _added(
    weight: LazyTensor, pairs: Mapping[str, tuple[LazyTensor, LazyTensor]], layout: Sharding, scale: float
) -> Tensor:
    there = weight.make()
    wide = there.to(torch.promote_types(there.dtype, torch.float32))
    for name, (a, b) in pairs.items():
        delta = scale * (b.make().to(wide.dtype) @ a.make().to(wide.dtype))
        if len(layout.shape) == 2:
            matrix = matrices_of(layout)[name]
            wide[_rows(matrix)] += delta
        elif len(layout.shape) == 3:
            wide += delta
        else:
            wide[:, ("gate", "up").index(name) if layout.shape[1] == 2 else 0] += delta
    return wide.to(there.dtype)


def _rows(matrix: LogicalMatrix) -> Tensor:
    """The rows of a stacked weight that belong to a matrix of it, in the matrix's order."""
    return torch.cat([torch.arange(first, first + count) for first, count in matrix.runs])
