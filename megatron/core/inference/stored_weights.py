"""Weights that lie on a grid, in generation: they stay in its bits, and are multiplied from there.

Whole numbers of 8 bits with a scale for each output, and of 4 bits in groups, have products of torch's own. Others are
made numbers again a part at a time, while the part is multiplied: less memory, and more time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from megatron.core.inference.products import INT8, Form, Int8, Upcast
from megatron.core.quantization.grid import Grid
from megatron.core.quantization.packing import packed, signed, unpacked

_PART = 1 << 19  # numbers of a weight that are in fp32 at once: what stays in the caches
_INT4_GROUPS = (32, 64, 128, 256)  # inputs that share a scale in torch's product with 4-bit weights
_INT4_OUTPUTS = 16
_E4M3_IN_FP16 = 256.0  # the bits of E4M3 as those of fp16 are numbers smaller by this factor


@dataclass(frozen=True)
class StoredScales:
    """The scales of a rank's part of a weight, ``[out, in]``. ``factors``, ``zeros``: ``[out, groups]``. ``groups``:
    ``[in]``, the group of each input, where groups don't begin with the part.
    """

    grid: Grid
    factors: Tensor
    zeros: Tensor | None = None
    groups: Tensor | None = None

    def codes(self, weight: Tensor) -> Tensor:
        """The codes of ``weight``, whose numbers are theirs, rounded to its type: int8, or E4M3."""
        found = weight.detach().float() / self.spread(self.factors.float(), weight.shape[1])
        if self.grid.kind == "float":
            return found.clamp(self.grid.lowest, self.grid.highest).to(self.grid.dtype)
        if self.zeros is not None:
            found += self.spread(self.zeros.float(), weight.shape[1])
        return found.round_().clamp_(self.grid.lowest, self.grid.highest).to(torch.int8)

    def spread(self, found: Tensor, inputs: int) -> Tensor:
        """A number for each input of ``[rows, groups]``; one column stays one."""
        if found.shape[1] == 1:
            return found
        if self.groups is not None:
            return found[:, self.groups]
        return found.repeat_interleave(self.grid.block[1], 1)[:, :inputs]


class StoredInt8(Int8):
    """8 bits with a scale for each output, as ``Int8`` has them, with codes that were chosen before."""

    measured: type[Form] = Int8

    def __init__(self, scales: StoredScales) -> None:
        self._scales = scales

    @override
    def refusal(self, weight: Tensor) -> str | None:
        """None, or why the weight can't be multiplied in 8 bits on this device."""
        return INT8.refusal(weight)

    @override
    def pack(self, weight: Tensor) -> Any:
        """The codes, in the memory layout of the product."""
        return self.packed(self._scales.codes(weight), self._scales.factors[:, 0].to(weight.dtype), weight)


class Int4:
    """4 bits in groups of inputs, symmetric, by torch's product, for which weights are bf16 or fp32."""

    copies = True

    def refusal(self, weight: Tensor) -> str | None:
        """None, or why torch's product doesn't take the weight."""
        if weight.device.type != "cpu" or weight.dtype not in (torch.bfloat16, torch.float32):
            return "it is for bf16 and fp32 on a CPU"
        return _int4_works(weight.dtype)

    def pack(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Codes of ``weight``, rounded in groups of 32, and scales."""
        groups = weight.detach().float().view(len(weight), -1, _INT4_GROUPS[0])
        factors = (groups.abs().amax(2) / 7).clamp(min=1e-30).to(weight.dtype)
        codes = (groups / factors.float()[:, :, None]).round().clamp(-8, 7).flatten(1)
        return _int4(codes.to(torch.int8), factors)

    def multiply(self, x: Tensor, packed: tuple[Tensor, Tensor], bias: Tensor | None) -> Tensor:
        """``x·weightᵀ + bias`` with a weight in 4 bits."""
        words, scales = packed
        group = x.shape[1] // scales.shape[0]
        found: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), words, group, scales)
        return found if bias is None else found + bias


def _int4(codes: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Codes ``[out, in]`` and factors ``[out, groups]`` as torch's product wants them."""
    words: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32) + 8, 1)
    turned = factors.t()
    return words, torch.stack((turned, torch.zeros_like(turned)), dim=-1).contiguous()


class StoredInt4(Int4):
    """4 bits with codes and scales that were chosen before."""

    measured: type[Form] = Int4

    def __init__(self, scales: StoredScales) -> None:
        self._scales = scales

    @override
    def pack(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The codes and scales."""
        return _int4(self._scales.codes(weight), self._scales.factors.to(weight.dtype))


@functools.cache
def _int4_works(dtype: torch.dtype) -> str | None:
    """None, or why torch's product with 4-bit weights can't be used: it is no public function."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-8, 8, (32, 64), generator=generator, dtype=torch.int8)
    factors = torch.rand(32, 2, generator=generator).to(dtype)
    x = torch.randn(3, 64, generator=generator).to(dtype)
    try:
        found = Int4().multiply(x, _int4(codes, factors), None)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError) as error:
        return f"this torch or processor has no such product ({str(error).splitlines()[0]})"
    expected = x.double() @ (codes * factors.double().repeat_interleave(32, 1)).t()
    is_close = bool((found.double() - expected).norm() <= 0.01 * expected.norm())
    return None if is_close else "this torch or processor computes it wrongly"


@dataclass(frozen=True)
class _Part:
    """Some outputs: their codes, packed, and scales."""

    codes: Tensor
    factors: Tensor
    zeros: Tensor | None


class StoredParts:
    """Codes in their bits; outputs are made numbers in fp32, some at a time, while they are multiplied."""

    copies = True
    measured: type[Form] = Upcast

    def __init__(self, scales: StoredScales) -> None:
        self._scales = scales
        self._inputs = 0

    def refusal(self, weight: Tensor) -> str | None:
        """None: every weight on a CPU is taken."""
        return None if weight.device.type == "cpu" else "it is for CPUs"

    def pack(self, weight: Tensor) -> list[_Part]:
        """Codes of groups of outputs, and their scales."""
        scales, rows = self._scales, max(1, _PART // max(1, weight.shape[1]))
        self._inputs = weight.shape[1]
        codes = scales.codes(weight)
        if scales.grid.bits < 8:
            codes = packed(codes, scales.grid.bits)
        zeros = [None] * len(codes) if scales.zeros is None else scales.zeros.split(rows)
        return [_Part(*each) for each in zip(codes.split(rows), scales.factors.float().split(rows), zeros)]

    def multiply(self, x: Tensor, packed: list[_Part], bias: Tensor | None) -> Tensor:
        """``x·weightᵀ + bias`` in fp32, one group of outputs after the other."""
        wide, sizes = x.float(), [len(part.codes) for part in packed]
        found = wide.new_empty(x.shape[0], sum(sizes))
        for part, columns in zip(packed, torch.split(found, sizes, dim=1), strict=True):
            torch.mm(wide, self._numbers(part).t(), out=columns)
        return (found if bias is None else found.add_(bias)).to(x.dtype)

    def _numbers(self, part: _Part) -> Tensor:
        """The numbers of some outputs, fp32 ``[outputs, in]``."""
        grid, factors = self._scales.grid, part.factors
        if grid.kind == "float":
            # The exponent and fraction of E4M3 are moved to where fp16 has them.
            bits = (part.codes.view(torch.int8).to(torch.int16) << 7) & ~0x4000
            codes, factors = bits.view(torch.float16).float(), factors * _E4M3_IN_FP16
        elif grid.bits < 8:
            codes = signed(unpacked(part.codes, grid.bits, self._inputs), grid.bits).float()
        else:
            codes = part.codes.float()
        if part.zeros is not None:
            codes = self._by_group(codes, part.zeros.float(), torch.Tensor.sub_)
        return self._by_group(codes, factors, torch.Tensor.mul_)

    def _by_group(self, codes: Tensor, found: Tensor, change: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """``codes``, changed in place by the number of each group of inputs."""
        group = self._scales.grid.block[1]
        if found.shape[1] > 1 and self._scales.groups is None and codes.shape[1] % group == 0:
            change(codes.view(len(codes), -1, group), found.unsqueeze(2))
            return codes
        return change(codes, self._scales.spread(found, codes.shape[1]))


def stored_form(weight: Tensor, scales: StoredScales) -> StoredInt8 | StoredInt4 | StoredParts:
    """The fastest form that keeps ``weight`` in the bits of its grid."""
    grid, is_plain = scales.grid, scales.zeros is None and scales.groups is None
    is_plain = is_plain and grid.kind == "int"
    if is_plain and grid.bits == 8 and scales.factors.shape[1] == 1 and INT8.refusal(weight) is None:
        return StoredInt8(scales)
    fits = grid.block[1] in _INT4_GROUPS and len(weight) % _INT4_OUTPUTS == 0 and weight.shape[1] % grid.block[1] == 0
    if is_plain and grid.bits == 4 and fits and Int4().refusal(weight) is None:
        return StoredInt4(scales)
    return StoredParts(scales)
