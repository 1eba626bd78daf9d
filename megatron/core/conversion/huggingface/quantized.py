"""Published weights in fewer bits, and what they are read as: the numbers that codes and scales stand for.

FP8 with scales of blocks (DeepSeek-V3), outputs or tensors, mxfp4 (gpt-oss), compressed-tensors, GPTQ and AWQ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.core.conversion.huggingface import compressed_tensors, gptq_awq
from megatron.core.conversion.huggingface.compressed_tensors import OF_CACHE
from megatron.core.conversion.huggingface.quantized_weights import StoredWeight, inputs_of, rows_of
from megatron.core.conversion.portable import LazyScales, LazyTensor
from megatron.core.ops.quantize import E4M3
from megatron.core.quantization.grid import Grid
from megatron.errors import CheckpointError

QUANTIZED = {"F8_E4M3": E4M3, "U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64}
"""Types of such weights, and of what lies beside them, in safetensors."""
_SCALES_OF_FP8 = ("weight_scale_inv", "weight_scale")
_BESIDE_FP8 = (*_SCALES_OF_FP8, "input_scale", "activation_scale", "k_scale", "v_scale")
_FP8_METHODS = ("fp8", "fbgemm_fp8", "modelopt")
_BLOCKS, _SCALES = "_blocks", "_scales"
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127  # of mxfp4's exponents of two
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Widened:
    """The tensors of a folder under their plain names, as numbers. ``quantized``: those that lie on a grid, of the
    ``method`` that the settings name. ``rounds_inputs``: whether programs round activations, too. ``cache``: scales of
    keys and values, by their names.
    """

    tensors: dict[str, LazyTensor]
    quantized: dict[str, StoredWeight] = field(default_factory=dict)
    method: str = ""
    rounds_inputs: bool = False
    cache: dict[str, LazyTensor] = field(default_factory=dict)

    def note(self, where: str) -> tuple[str, ...]:
        """What a user should know of the numbers that are read."""
        if not self.quantized:
            return ()
        first, *_ = self.quantized
        dtype = str(self.tensors[first].dtype).removeprefix("torch.")
        inputs = ", and activations aren't rounded" if self.rounds_inputs else ""
        return (
            f"note: {len(self.quantized)} weights of {where} are quantized ({self.method}): read as {dtype}{inputs}",
        )


def check_quantization(config: Mapping[str, Any], *, where: str) -> None:
    """Raise CheckpointError for weights that are quantized in a way that isn't read."""
    found = config.get("quantization_config")
    if not found:
        return
    kind = found.get("quant_method") if isinstance(found, dict) else None
    if kind == "compressed-tensors":
        compressed_tensors.groups_in(found, where=where)
    elif kind in ("gptq", "awq"):
        gptq_awq.check_settings(found, where=where)
    elif kind != "mxfp4" and not (kind in _FP8_METHODS and _fp8_block(found) is not None):
        named = f" of {kind}" if isinstance(kind, str) and kind else ""
        raise CheckpointError(
            f"{where} has a quantization_config{named}, so the weights are quantized; convert the model in bf16, fp16 "
            "or fp32 (compressed-tensors, fp8, GPTQ, AWQ and mxfp4 are read)"
        )


def _fp8_block(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns that share a scale, (0, 0) where the scales themselves say; None for settings that aren't
    read.
    """
    if settings["quant_method"] == "modelopt" and settings.get("quant_algo") not in (
        "FP8",
        "FP8_PER_CHANNEL_PER_TOKEN",
    ):
        return None
    block = settings.get("weight_block_size")
    if block is None:
        return 0, 0
    is_block = isinstance(block, list) and [type(each) for each in block] == [int, int] and min(block) > 0
    return (block[0], block[1]) if is_block else None


def widened(config: Mapping[str, Any], tensors: Mapping[str, LazyTensor], *, where: str) -> Widened:
    """The tensors of a quantized model in the type that its settings name, or bf16; those of any other as they are."""
    check_quantization(config, where=where)
    settings = config.get("quantization_config") or {}
    strange = [name for name, tensor in tensors.items() if not settings and tensor.dtype in QUANTIZED.values()]
    if strange:
        kind = str(tensors[strange[0]].dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{where}: {strange[0]} is of type {kind}, and no quantization_config says how it is read"
        )
    method = settings.get("quant_method")
    if method is None:
        return Widened(dict(tensors))
    if method == "mxfp4":
        return Widened(_of_mxfp4(tensors, where=where))
    read = _read_fp8 if method in _FP8_METHODS else gptq_awq.read_gptq_or_awq
    read = compressed_tensors.read_compressed if method == "compressed-tensors" else read
    plain, found = read(settings, tensors, where=where)
    dtype = stated_type(config)
    values = {name: weight.values(dtype) for name, weight in found.items()}
    strange = [name for name, tensor in plain.items() if tensor.dtype in QUANTIZED.values()]
    if strange:
        kind = str(plain[strange[0]].dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{where}: {strange[0]} is of type {kind}, and its quantization_config doesn't say how it is read"
        )
    cache = {name: tensor for name, tensor in tensors.items() if name.endswith(OF_CACHE)}
    return Widened({**plain, **values}, found, str(method), _rounds_inputs(settings), cache)


def stated_type(config: Mapping[str, Any]) -> torch.dtype:
    """The type that the settings of a quantized model name for its numbers, or bf16."""
    return _DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), torch.bfloat16)


def _rounds_inputs(settings: Mapping[str, Any]) -> bool:
    """Whether the settings say that activations are rounded."""
    if settings["quant_method"] != "compressed-tensors":
        return settings["quant_method"] in _FP8_METHODS
    groups = settings["config_groups"].values()
    return any(each.get("input_activations") is not None for each in groups)


def _read_fp8(
    settings: Mapping[str, Any], tensors: Mapping[str, LazyTensor], *, where: str
) -> tuple[dict[str, LazyTensor], dict[str, StoredWeight]]:
    """Weights in fp8 with a scale for each block, or for each output or the tensor, as the scales' shape says."""
    block = _fp8_block(settings)
    assert block is not None, "the settings were checked"
    plain: dict[str, LazyTensor] = {}
    found: dict[str, StoredWeight] = {}
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        if last in _BESIDE_FP8:
            continue
        if tensor.dtype != E4M3:
            plain[name] = tensor
            continue
        scales = [tensors[f"{module}.{each}"] for each in _SCALES_OF_FP8 if f"{module}.{each}" in tensors]
        scale = scales[0] if scales else None
        shape = tuple(tensor.shape)
        wanted = Grid("float", 8, block).scales_shape((shape[0], shape[-1])) if len(shape) == 2 else ()
        by_output = not any(block) and scale is not None and scale.shape in ((shape[0],), (shape[0], 1))
        is_one = wanted == (1, 1) and scale is not None and scale.shape in ((), (1,))
        if scale is None or not (scale.shape == wanted or by_output or is_one) or last != "weight" or len(shape) != 2:
            raise CheckpointError(
                f"{where}: {name} is in fp8, and no {module}.{_SCALES_OF_FP8[0]} of shape {list(wanted)} is there"
            )
        grid = Grid("float", 8, (1, 0) if by_output else block)
        wide = LazyTensor(scale.shape, torch.float32, partial(_wide, scale))
        rows = rows_of(wide, shape[0], 1 if by_output else grid.sides((shape[0], shape[1]))[0])
        held = LazyScales(rows, inputs=inputs_of(tensors.get(f"{module}.input_scale")))
        found[name] = StoredWeight((shape[0], shape[1]), grid, tensor.make, held)
    return plain, found


def _wide(scale: LazyTensor) -> Tensor:
    return scale.make().float()


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
