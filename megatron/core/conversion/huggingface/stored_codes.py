"""Codes and scales of a weight as the tensors of quantized folders: compressed-tensors, and fp8 in scaled blocks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.core.conversion.huggingface.micro_scales import MicroFormat, micro_format
from megatron.core.conversion.portable import LazyScales, LazyTensor
from megatron.core.quantization.grid import Grid, Scales, codes_of, scales_of, values_of_codes
from megatron.core.quantization.packing import WORD_BITS, packed
from megatron.core.quantization.scheme import Scheme
from megatron.errors import CheckpointError

COMPRESSED_TENSORS = "compressed-tensors"
HF_QUANT_CONFIG = "hf_quant_config.json"
"""The file in which programs of ModelOpt look for the kind of quantization."""
_MODELOPT = {"fp8": "FP8_PER_CHANNEL_PER_TOKEN", "fp8-tensor": "FP8", "fp8-block": "FP8_BLOCK_SCALES"}


def is_block(scheme: Scheme) -> bool:
    """Whether folders of a scheme are of transformers' own kind ``fp8``, with a scale for each block."""
    return scheme.weights.block[0] > 1


def format_name(scheme: Scheme) -> str:
    """What compressed-tensors calls the layout of weights."""
    if (micro := micro_format(scheme)) is not None:
        return micro.format
    if scheme.weights.kind == "float":
        return "float-quantized"
    return "pack-quantized" if scheme.activations is None else "int-quantized"


def quantization_config(scheme: Scheme, ignored: list[str]) -> dict[str, Any]:
    """The ``quantization_config`` of a folder. ``ignored``: names and patterns of linear layers that aren't."""
    grid = scheme.weights
    if is_block(scheme):
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(grid.block),
            "modules_to_not_convert": ignored,
        }
    kind = {"num_bits": grid.bits, "type": grid.kind}
    strategy: dict[str, Any] = {"strategy": "tensor"} if grid.block == (0, 0) else {"strategy": "channel"}
    if grid.block[1]:
        strategy = {"strategy": "group", "group_size": grid.block[1]}
    inputs = None
    if scheme.activations is not None:
        dynamic = scheme.activations == "token"
        inputs = {**kind, "symmetric": True, "strategy": scheme.activations, "dynamic": dynamic}
    micro = micro_format(scheme)
    weights = (
        {**kind, "symmetric": grid.symmetric, **strategy, "dynamic": False} if micro is None else micro.arguments()
    )
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": COMPRESSED_TENSORS,
        "format": format_name(scheme),
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
        "kv_cache_scheme": None,
    }


def is_for_modelopt(scheme: Scheme) -> bool:
    """Whether programs of ModelOpt read folders of a scheme."""
    return scheme.name in _MODELOPT


def modelopt_config(scheme: Scheme, ignored: list[str], *, has_cache: bool = False) -> dict[str, Any] | None:
    """What ``hf_quant_config.json`` says of an FP8 folder; None for a scheme that ModelOpt's readers don't share.

    ``has_cache``: whether keys and values have scales.
    """
    if not is_for_modelopt(scheme):
        return None
    cache = "FP8" if has_cache else None
    found: dict[str, Any] = {"quant_algo": _MODELOPT[scheme.name], "kv_cache_quant_algo": cache}
    if is_block(scheme):
        found |= {"group_size": scheme.weights.block[1]}
    names = [_wildcards(each) for each in ignored]
    return {"producer": {"name": "pretrain-megatron"}, "quantization": {**found, "exclude_modules": names}}


def _wildcards(ignored: str) -> str:
    """A name, or a pattern ``re:...``, as the pattern of file names (fnmatch) that programs of ModelOpt match."""
    if not ignored.startswith("re:"):
        return ignored
    return re.sub(r"\\(.)", r"\1", ignored.removeprefix("re:").replace(".*", "*").removesuffix("$"))


def stored(
    name: str,
    weight: LazyTensor,
    scheme: Scheme,
    scales: LazyScales | None,
    dtype: torch.dtype,
    *,
    largest: Callable[[], Tensor] | None = None,
) -> dict[str, LazyTensor]:
    """The tensors that take the place of ``name``, a weight ``[out, in]``, each made once, from the weight read once.

    ``scales``: those by which its codes are exact, or None to choose them. ``dtype``: the model's.
    ``largest``: gives the largest magnitude of the weights that programs join with this one.
    """
    module, (rows, columns) = name.removesuffix("weight"), weight.shape
    if (micro := micro_format(scheme)) is not None:
        made = _parts(micro.shapes(rows, columns), partial(_stored_micro, micro, weight, largest))
        return {f"{module}{kind}": tensor for kind, tensor in made.items()}
    grid = scheme.weights
    shape, of_scales = (rows, columns), torch.Size(grid.scales_shape((rows, columns)))
    factors = grid.scales_dtype(dtype) if scales is None else scales.factors.dtype
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    if format_name(scheme) == "pack-quantized":
        shapes["weight_packed"] = ((rows, -(-columns * grid.bits // WORD_BITS)), torch.int32)
        shapes["weight_shape"] = ((2,), torch.int64)
    else:
        shapes["weight"] = (shape, grid.dtype)
    by_tensor = grid.block == (0, 0)
    shapes["weight_scale_inv" if is_block(scheme) else "weight_scale"] = ((1,) if by_tensor else of_scales, factors)
    if not grid.symmetric:
        shapes["weight_zero_point"] = ((-(-rows * grid.bits // WORD_BITS), of_scales[1]), torch.int32)
    if scales is not None and scales.inputs is not None:
        shapes["input_scale"] = ((1,), scales.inputs.dtype)

    def make() -> dict[str, Tensor]:
        numbers = weight.make()
        held = scales_of(numbers, grid, factors) if scales is None else _held(scales, grid, shape, name)
        codes = codes_of(numbers, held, grid)
        made = {
            "weight": codes,
            "weight_scale": held.factors.view(1) if by_tensor else held.factors,
            "weight_scale_inv": held.factors,
            "weight_shape": torch.tensor(shape),
        }
        if "weight_packed" in shapes:
            made["weight_packed"] = packed(codes, grid.bits)
        if held.zeros is not None:
            made["weight_zero_point"] = packed(held.zeros.t().contiguous(), grid.bits).t().contiguous()
        if scales is not None and scales.inputs is not None:
            made["input_scale"] = scales.inputs.make().view(1)
        return {kind: made[kind] for kind in shapes}

    return {f"{module}{kind}": tensor for kind, tensor in _parts(shapes, make).items()}


def _stored_micro(micro: MicroFormat, weight: LazyTensor, largest: Callable[[], Tensor] | None) -> dict[str, Tensor]:
    return micro.stored(weight.make(), None if largest is None else largest())


def dequantized(
    name: str,
    weight: LazyTensor,
    scheme: Scheme,
    scales: LazyScales | None,
    dtype: torch.dtype,
    *,
    in_fp32: bool,
    largest: Callable[[], Tensor] | None = None,
) -> LazyTensor:
    """The weight that its codes and scales stand for, as fp32. ``in_fp32``: multiplied in fp32, as by readers that take
    scales in fp32, too; else rounded to the type of scales, as by those that dequantize whole weights. ``largest``: as
    for ``stored``.
    """
    grid, (rows, columns) = scheme.weights, weight.shape

    micro = micro_format(scheme)

    def make() -> Tensor:
        numbers = weight.make()
        if micro is not None:
            return micro.values(micro.stored(numbers, None if largest is None else largest())).float()
        held = (
            scales_of(numbers, grid, grid.scales_dtype(dtype))
            if scales is None
            else _held(scales, grid, (rows, columns), name)
        )
        values = values_of_codes(codes_of(numbers, held, grid), held, grid, torch.float32 if in_fp32 else None)
        return values.float()

    return LazyTensor(weight.shape, torch.float32, make)


def _held(scales: LazyScales, grid: Grid, shape: tuple[int, int], name: str) -> Scales:
    """The scales of a weight as files keep them; CheckpointError where outputs that share one differ."""
    factors = scales.factors.make()
    zeros = None if scales.zeros is None else scales.zeros.make()
    rows, wanted = grid.sides(shape)[0], grid.scales_shape(shape)
    if rows > 1:
        shared = factors[::rows]
        if not torch.equal(shared.repeat_interleave(rows, 0)[: len(factors)], factors):
            raise CheckpointError(f"{name}: outputs that share a scale in this format have several; quantize it anew")
        factors = shared
    if tuple(factors.shape) != wanted:
        raise CheckpointError(f"{name}: its scales are {list(factors.shape)} and should be {list(wanted)}")
    return Scales(factors, zeros)


def _parts(
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], make: Callable[[], dict[str, Tensor]]
) -> dict[str, LazyTensor]:
    """Tensors that are made together, when the first of them is read, and given up one by one."""
    waiting: dict[str, Tensor] = {}

    def part(kind: str) -> Tensor:
        if kind not in waiting:
            waiting.update(make())
        return waiting.pop(kind)

    return {kind: LazyTensor(shape, dtype, partial(part, kind)) for kind, (shape, dtype) in shapes.items()}
