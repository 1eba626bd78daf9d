"""Quantized weights of TensorRT-LLM checkpoints: which schemes it has a layout for, and the tensors of each.

``FP8``: codes, a scale of the weight and one of its inputs. ``W4A16_AWQ``: two outputs in a byte, the even one in its
lower half, and scales of groups of inputs. ``W8A16``: numbers, which trtllm-build rounds while it loads them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from megatron.core.conversion.portable import LazyScales, LazyTensor, PortableModel
from megatron.core.quantization.grid import Grid, Scales, codes_of, scales_of, values_of_codes
from megatron.core.quantization.scheme import Scheme
from megatron.core.quantization.targets import is_quantized
from megatron.errors import ConfigError

_ALGORITHMS = {"int8": "W8A16", "int4": "W4A16_AWQ", "fp8-tensor": "FP8"}
_NEVER = ["*lm_head", "*router", "*vocab_embedding", "*position_embedding"]
_LEAST = 64  # columns and rows of W4A16_AWQ are whole multiples of this, or of a group, for each rank


@dataclass(frozen=True)
class FewBits:
    """What is quantized. ``names``: our weights, with their scales; None where they are yet to be chosen. ``gated``:
    whether the first layer of an MLP is two matrices.
    """

    scheme: Scheme
    names: Mapping[str, LazyScales | None]
    ignored: tuple[str, ...]
    gated: bool = False

    @property
    def algorithm(self) -> str:
        """What config.json calls the scheme."""
        return _ALGORITHMS[self.scheme.name]

    def settings(self) -> dict[str, Any]:
        """The field ``quantization``, without that of keys and values."""
        found: dict[str, Any] = {"quant_algo": self.algorithm, "exclude_modules": [*_NEVER, *self.ignored]}
        if self.algorithm == "W4A16_AWQ":
            found |= {"group_size": self.scheme.weights.block[1], "has_zero_point": False, "pre_quant_scale": False}
        return found

    def given(self, name: str, shape: tuple[int, ...]) -> Scales | None:
        """Scales ``[outputs of all experts, groups]`` that a method chose for a weight of ``shape``; None for none.

        FP8 has one scale for each matrix of TensorRT-LLM: the largest of those that it joins, by which codes are made.
        """
        if (held := self.names[name]) is None:
            return None
        factors = _flat(held.factors.make())
        if self.algorithm != "FP8":
            return Scales(factors)
        matrices = shape[0] if ".experts." in name else 2 if self.gated and "linear_fc1" in name else 1
        each = factors.reshape(matrices, -1)
        return Scales(each.amax(-1, keepdim=True).repeat(1, each.shape[1]).reshape(factors.shape))

    def joined(self, tensors: Mapping[str, LazyTensor]) -> list[str]:
        """The weights of FP8 that are rounded anew, as TensorRT-LLM has one scale for parts that have their own."""
        if self.algorithm != "FP8":
            return []
        held = {name: scales for name, scales in self.names.items() if scales is not None}
        return [
            name
            for name, scales in held.items()
            if (found := self.given(name, tensors[name].shape)) is not None
            and not torch.equal(found.factors, _flat(scales.factors.make()))
        ]


def chosen_few_bits(portable: PortableModel, scheme: Scheme | None, ignored: Collection[str]) -> FewBits | None:
    """What is quantized; None for nothing. ``scheme``: that of ``--quantize``. ConfigError for what has no layout."""
    given = portable.quantization
    if given is not None and scheme is not None:
        raise ConfigError(
            f"--quantize {scheme.name}: the model is quantized already, to {given.scheme.name} by {given.method}; "
            "quantize the model that it was made of"
        )
    kind = given.scheme if given is not None else scheme
    if kind is None:
        return None
    if kind.name not in _ALGORITHMS:
        raise ConfigError(
            f"{kind.name} has no verified layout in TensorRT-LLM checkpoints: there are int8 (W8A16), int4 (W4A16_AWQ) "
            f"and, by tools/quantize.py, fp8-tensor (FP8); trtllm-serve reads a folder of --to hf in fp8 and fp8-block"
        )
    if kind.needs_calibration and given is None:
        raise ConfigError(f"--quantize {kind.name}: scales of its activations are found by tools/quantize.py")
    if kind.name == "int4" and portable.dtype not in (torch.bfloat16, torch.float16):
        raise ConfigError(
            f"{kind.name}: TensorRT-LLM multiplies weights of 4 bits with activations of 16 bits, and this model is in "
            f"{str(portable.dtype).removeprefix('torch.')}: convert one in bf16 or fp16"
        )
    linear = [name for name in portable.tensors if is_quantized(name)]
    left = dict.fromkeys(linear) if given is None else dict(given.scales)
    left = {name: scales for name, scales in left.items() if not any(map(_names(name), ignored))}
    unused = [each for each in ignored if not any(_names(name)(each) for name in linear)]
    if unused:
        raise ConfigError(
            f"--quantize-ignore {unused[0]} names no linear layer; names are this project's, such as {linear[0]}, and "
            "may have * in them"
        )
    if not left:
        raise ConfigError(f"--quantize {kind.name}: nothing is left to quantize; ignore fewer layers")
    return FewBits(
        kind, left, tuple(_modules([name for name in linear if name not in left], [*left])), portable.model.gated
    )


def _names(name: str) -> Any:
    return lambda pattern: fnmatchcase(name, pattern) or fnmatchcase(name.removesuffix(".weight"), pattern)


_MODULES = {
    "self_attention.linear_qkv": "attention.qkv",
    "self_attention.linear_proj": "attention.dense",
    "mlp.linear_fc1": "mlp.fc mlp.gate",
    "mlp.linear_fc2": "mlp.proj",
    "mlp.experts.linear_fc1": "mlp",
    "mlp.experts.linear_fc2": "mlp",
}


def _modules_of(name: str) -> list[str]:
    """TensorRT-LLM's modules that hold one of our weights."""
    return _MODULES[name.removesuffix(".weight").split(".", 3)[3]].split()


def _modules(left_out: Collection[str], quantized: Collection[str]) -> list[str]:
    """Patterns of TensorRT-LLM's modules that stay as they are.

    Its layers are numbered anew in each stage, so only modules of all layers can be left out.
    """
    few = {module: name for name in quantized for module in _modules_of(name)}
    found: dict[str, None] = {}
    for name in left_out:
        for module in _modules_of(name):
            if module in few:
                raise ConfigError(
                    f"{name} isn't quantized, and {few[module]} is: a TensorRT-LLM checkpoint leaves {module} as it is "
                    f"in all layers or in none; or export a folder with --to hf"
                )
            # The first pattern is matched with modules, the second with tensors.
            found |= dict.fromkeys((f"*{module}", f"*{module}.weight"))
    return list(found)


def check_parts(name: str, parts: Collection[Tensor], scheme: Scheme) -> None:
    """Raise ConfigError for parts of a weight ``[..., out, in]`` that TensorRT-LLM would pad."""
    if scheme.name != "int4":
        return
    group = scheme.weights.block[1]
    for part in parts:
        rows, columns = part.shape[-2:]
        unit = max(group, _LEAST)
        if group not in (64, 128) or rows % unit or columns % unit:
            raise ConfigError(
                f"int4: {name} has {rows} outputs and {columns} inputs on a rank, and TensorRT-LLM takes groups of 64 "
                f"or 128 inputs and whole multiples of {unit} of both; give another --group-size, fewer ranks, or "
                "--quantize int8"
            )


def codes_and_scales(weight: Tensor, scales: Scales | None, grid: Grid, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes ``[..., out, in]`` and scales ``[..., out, groups]``, a row for each output, of a weight."""
    flat = weight.reshape(-1, weight.shape[-1])
    if scales is None:
        scales = scales_of(flat, grid, dtype)
    codes = codes_of(flat, Scales(_rows(scales.factors, len(flat))), _rowwise(grid))
    shape = weight.shape[:-1]
    return codes.view(weight.shape), _rows(scales.factors, len(flat)).reshape(*shape, -1)


def dequantized(name: str, weight: LazyTensor, few_bits: FewBits, dtype: torch.dtype) -> Tensor:
    """The numbers in fp32 that the codes of a weight stand for."""
    grid, scheme = few_bits.scheme.weights, few_bits.scheme
    number = weight.make()
    if scheme.name == "int8":
        return number.float()
    codes, factors = codes_and_scales(number, few_bits.given(name, weight.shape), grid, grid.scales_dtype(dtype))
    flat = codes.reshape(-1, codes.shape[-1])
    values = values_of_codes(flat, Scales(factors.reshape(len(flat), -1)), _rowwise(grid), torch.float32)
    return values.view(number.shape)


def _flat(factors: Tensor) -> Tensor:
    return factors.reshape(-1, factors.shape[-1])


def _rows(factors: Tensor, rows: int) -> Tensor:
    return factors.expand(rows, -1)


def _rowwise(grid: Grid) -> Grid:
    """The grid with a row of scales for each output."""
    return Grid(grid.kind, grid.bits, (1, grid.block[1]), grid.symmetric)


def packed_outputs(codes: Tensor) -> Tensor:
    """Codes of 4 bits, int8 ``[..., out, in]``, as int8 ``[..., out / 2, in]``: even outputs in the lower half."""
    low, high = codes[..., ::2, :], codes[..., 1::2, :]
    return (low & 15) | (high << 4)
