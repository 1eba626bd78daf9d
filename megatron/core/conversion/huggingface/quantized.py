"""Published weights in fewer bits, which are read as bf16: fp8 in scaled blocks (DeepSeek-V3), and mxfp4 (gpt-oss)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.core.conversion.portable import LazyTensor
from megatron.errors import CheckpointError

QUANTIZED = {"F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8}
"""Types of such weights in safetensors."""
_SCALE, _BLOCKS, _SCALES = "_scale_inv", "_blocks", "_scales"
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127  # of mxfp4's exponents of two


def check_quantization(config: Mapping[str, Any], *, where: str) -> None:
    """Raise CheckpointError for weights that are quantized in a way that isn't read."""
    found = config.get("quantization_config")
    if not found:
        return
    kind = found.get("quant_method") if isinstance(found, dict) else None
    block = found.get("weight_block_size") if isinstance(found, dict) else None
    is_block = isinstance(block, list) and [type(each) for each in block] == [int, int] and min(block) > 0
    if kind == "mxfp4" or (kind == "fp8" and is_block):
        return
    named = f" of {kind}" if isinstance(kind, str) and kind else ""
    raise CheckpointError(
        f"{where} has a quantization_config{named}, so the weights are quantized; convert the model in bf16, fp16 or "
        "fp32 (fp8 with a weight_block_size and mxfp4 are read)"
    )


def widened(config: Mapping[str, Any], tensors: Mapping[str, LazyTensor], *, where: str) -> dict[str, LazyTensor]:
    """The tensors of a quantized model in bf16, under their plain names; those of any other model as they are."""
    check_quantization(config, where=where)
    settings = config.get("quantization_config") or {}
    strange = [name for name, tensor in tensors.items() if not settings and tensor.dtype in QUANTIZED.values()]
    if strange:
        kind = str(tensors[strange[0]].dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{where}: {strange[0]} is of type {kind}, and no quantization_config says how it is read"
        )
    if settings.get("quant_method") == "fp8":
        return _of_fp8(tensors, tuple(settings["weight_block_size"]), where=where)
    return _of_mxfp4(tensors, where=where) if settings.get("quant_method") == "mxfp4" else dict(tensors)


def _of_fp8(tensors: Mapping[str, LazyTensor], block: tuple[int, int], *, where: str) -> dict[str, LazyTensor]:
    found = {}
    for name, tensor in tensors.items():
        if name.endswith(_SCALE) and name.removesuffix(_SCALE) in tensors:
            continue
        if tensor.dtype != torch.float8_e4m3fn:
            found[name] = tensor
            continue
        scale = tensors.get(f"{name}{_SCALE}")
        wanted = tuple(-(-size // side) for size, side in zip(tensor.shape, block))
        if scale is None or scale.shape != wanted or len(tensor.shape) != 2:
            raise CheckpointError(f"{where}: {name} is in fp8, and no {name}{_SCALE} of shape {list(wanted)} is there")
        found[name] = LazyTensor(tensor.shape, torch.bfloat16, partial(_scaled_blocks, tensor, scale, block))
    return found


def _scaled_blocks(tensor: LazyTensor, scale: LazyTensor, block: tuple[int, int]) -> Tensor:
    rows, columns = tensor.shape
    factors = scale.make().float().repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return (tensor.make().float() * factors).to(torch.bfloat16)


def _of_mxfp4(tensors: Mapping[str, LazyTensor], *, where: str) -> dict[str, LazyTensor]:
    found = {}
    for name, tensor in tensors.items():
        if name.endswith(_SCALES):
            continue
        if not name.endswith(_BLOCKS):
            found[name] = tensor
            continue
        plain = name.removesuffix(_BLOCKS)
        scales = tensors.get(f"{plain}{_SCALES}")
        if scales is None or len(tensor.shape) != 4 or scales.shape != tensor.shape[:3]:
            raise CheckpointError(f"{where}: {name} has no {plain}{_SCALES} of shape {list(tensor.shape[:3])}")
        experts, outputs, groups, packed = tensor.shape
        shape = (experts, groups * packed * 2, outputs)
        found[plain] = LazyTensor(shape, torch.bfloat16, partial(_unpacked, tensor, scales))
    return found


def _unpacked(blocks: LazyTensor, scales: LazyTensor) -> Tensor:
    """``[E, out, groups, bytes]``, two numbers a byte, the lower bits first, and an exponent of two for each group, to
    ``[E, in, out]`` (OCP Microscaling Formats 1.0).
    """
    values = torch.tensor([*_FP4, *(-each for each in _FP4)], dtype=torch.bfloat16)
    packed = blocks.make()
    numbers = torch.stack((values[(packed & 15).int()], values[(packed >> 4).int()]), dim=-1).flatten(-2)
    exponents = scales.make().int().unsqueeze(-1) - _BIAS
    return torch.ldexp(numbers, exponents).flatten(-2).transpose(1, 2).contiguous()
