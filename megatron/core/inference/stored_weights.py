"""Weights that lie on a grid, in generation: they stay in its bits, and are multiplied from there.

Whole numbers of 8 bits with a scale for each output, and of 4 bits in groups, have products of torch's own. Others are
made numbers again a part at a time, while the part is multiplied: less memory, and more time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from megatron.core.inference.products import INT8, Form, Int8, Upcast
from megatron.core.quantization.grid import Grid
from megatron.core.quantization.packing import packed

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
    """4 bits in groups of inputs by torch's product, for models in bf16 and fp32.

    It adds a number for each group, which is that of the zero point in the type of the model: in bf16 rounded by less
    than whole weights are when they are numbers.
    """

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
        return _int4(codes.to(torch.int8), factors, None)

    def multiply(self, x: Tensor, packed: tuple[Tensor, Tensor], bias: Tensor | None) -> Tensor:
        """``x·weightᵀ + bias`` with a weight in 4 bits."""
        words, scales = packed
        group = x.shape[1] // scales.shape[0]
        found: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), words, group, scales)
        return found if bias is None else found + bias


def _int4(codes: Tensor, factors: Tensor, zeros: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes ``[out, in]``, and factors and zero points ``[out, groups]``, as torch's product wants them."""
    words: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32) + 8, 1)
    added = torch.zeros_like(factors) if zeros is None else (-zeros.float() * factors.float()).to(factors.dtype)
    return words, torch.stack((factors.t(), added.t()), dim=-1).contiguous()


class StoredInt4(Int4):
    """4 bits with codes and scales that were chosen before."""

    measured: type[Form] = Int4

    def __init__(self, scales: StoredScales) -> None:
        self._scales = scales

    @override
    def pack(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The codes and scales."""
        return _int4(self._scales.codes(weight), self._scales.factors.to(weight.dtype), self._scales.zeros)


@functools.cache
def _int4_works(dtype: torch.dtype) -> str | None:
    """None, or why torch's product with 4-bit weights can't be used: it is no public function."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-8, 8, (32, 64), generator=generator, dtype=torch.int8)
    factors = torch.rand(32, 2, generator=generator).to(dtype)
    x = torch.randn(3, 64, generator=generator).to(dtype)
    try:
        found = Int4().multiply(x, _int4(codes, factors, None), None)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError) as error:
        return f"this torch or processor has no such product ({str(error).splitlines()[0]})"
    expected = x.double() @ (codes * factors.double().repeat_interleave(32, 1)).t()
    is_close = bool((found.double() - expected).norm() <= 0.01 * expected.norm())
    return None if is_close else "this torch or processor computes it wrongly"


@dataclass(frozen=True)
class _Part:
    """Some outputs: their codes, packed, scales, and the codes of zero as files count them, from the smallest."""

    codes: Tensor
    factors: Tensor
    zeros: Tensor | None


class Room:
    """Memory for a part of a weight, which all weights use in turn: fresh memory takes more time than what is written
    into it.
    """

    def __init__(self) -> None:
        self._held: dict[torch.dtype, Tensor] = {}

    def of(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """Numbers of a type, whatever they are."""
        count = math.prod(shape)
        if dtype not in self._held or self._held[dtype].numel() < count:
            self._held[dtype] = torch.empty(max(count, _PART), dtype=dtype)
        return self._held[dtype][:count].view(shape)


class StoredParts:
    """Codes in their bits; outputs are made numbers in fp32, some at a time, while they are multiplied."""

    copies = True
    measured: type[Form] = Upcast

    def __init__(self, scales: StoredScales, room: Room) -> None:
        self._scales, self._room, self._inputs = scales, room, 0

    def refusal(self, weight: Tensor) -> str | None:
        """None: every weight on a CPU is taken."""
        return None if weight.device.type == "cpu" else "it is for CPUs"

    def pack(self, weight: Tensor) -> list[_Part]:
        """Codes of groups of outputs, and their scales."""
        scales, rows = self._scales, max(1, _PART // max(1, weight.shape[1]))
        grid, self._inputs = scales.grid, weight.shape[1]
        codes, factors, zeros = scales.codes(weight), scales.factors.float(), None
        if grid.kind == "float":
            factors = factors * _E4M3_IN_FP16
        elif grid.bits < 8:
            codes, offset = packed(codes, grid.bits), -grid.lowest
            zeros = torch.full_like(factors, offset) if scales.zeros is None else scales.zeros.float() + offset
        elif scales.zeros is not None:
            zeros = scales.zeros.float()
        groups = [None] * len(codes) if zeros is None else torch.split(zeros, rows)
        return [_Part(*each) for each in zip(torch.split(codes, rows), torch.split(factors, rows), groups)]

    def multiply(self, x: Tensor, packed: list[_Part], bias: Tensor | None) -> Tensor:
        """``x·weightᵀ + bias`` in fp32, one group of outputs after the other."""
        wide, sizes = x.float(), [len(part.codes) for part in packed]
        found = wide.new_empty(x.shape[0], sum(sizes))
        for part, columns in zip(packed, torch.split(found, sizes, dim=1), strict=True):
            codes = self._numbers(part)
            has_columns = part.factors.shape[1] > 1
            if part.zeros is not None:
                self._by_group(codes, part.zeros, torch.Tensor.sub_)
            if has_columns:
                self._by_group(codes, part.factors, torch.Tensor.mul_)
            torch.mm(wide, codes.t(), out=columns)
            if not has_columns:
                columns.mul_(part.factors.t())
        return (found if bias is None else found.add_(bias)).to(x.dtype)

    def _numbers(self, part: _Part) -> Tensor:
        """The codes of some outputs as fp32 ``[outputs, in]``; those of a few bits count from the smallest."""
        rows, inputs, grid = len(part.codes), self._inputs, self._scales.grid
        if grid.kind == "float":
            # The exponent and fraction of E4M3 are moved to where fp16 has them, and the sign to where it was.
            bits = self._room.of(torch.int16, rows, inputs)
            bits.copy_(part.codes.view(torch.int8)).mul_(1 << 7).bitwise_and_(~0x4000)
            return self._room.of(torch.float32, rows, inputs).copy_(bits.view(torch.float16))
        if grid.bits == 8:
            return self._room.of(torch.float32, rows, inputs).copy_(part.codes)
        filled, each = part.codes.view(torch.uint8), 8 // grid.bits
        wide = self._room.of(torch.float32, rows, filled.shape[1], each)
        one = self._room.of(torch.uint8, *filled.shape)
        for place in range(each):
            torch.bitwise_right_shift(filled, grid.bits * place, out=one)
            wide[..., place] = one.bitwise_and_((1 << grid.bits) - 1)
        return wide.view(rows, -1)[:, :inputs]

    def _by_group(self, codes: Tensor, found: Tensor, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Change ``codes`` in place by the number of each group of inputs."""
        group = self._scales.grid.block[1]
        is_even = group > 0 and codes.shape[1] % group == 0 and codes.is_contiguous()
        if found.shape[1] > 1 and self._scales.groups is None and is_even:
            change(codes.view(len(codes), -1, group), found.unsqueeze(2))
        else:
            change(codes, self._scales.spread(found, codes.shape[1]))


def stored_form(weight: Tensor, scales: StoredScales, room: Room) -> StoredInt8 | StoredInt4 | StoredParts:
    """The fastest form that keeps ``weight`` in the bits of its grid. ``room``: one for all weights of a model."""
    grid, is_plain = scales.grid, scales.grid.kind == "int" and scales.groups is None
    if (
        is_plain
        and scales.zeros is None
        and grid.bits == 8
        and scales.factors.shape[1] == 1
        and INT8.refusal(weight) is None
    ):
        return StoredInt8(scales)
    fits = grid.block[1] in _INT4_GROUPS and len(weight) % _INT4_OUTPUTS == 0 and weight.shape[1] % grid.block[1] == 0
    if is_plain and grid.bits == 4 and fits and Int4().refusal(weight) is None:
        return StoredInt4(scales)
    return StoredParts(scales, room)
