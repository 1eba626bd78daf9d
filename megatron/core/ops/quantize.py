"""FP8 quantization: E4M3 and E5M2, with a scale for the whole tensor, blocks of 128, or blocks of 32.

Formulas are those of Transformer Engine's kernels, in exact integer or IEEE arithmetic, so that equal input gives equal
bytes on every device. Values are clamped before every cast, because casts of values that are too large differ between
devices and versions of torch. Scales have a dimension where they multiply values, so that torch does it in their type,
fp32, without a wide copy of bf16 values. No function here has a gradient.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

LARGEST: dict[torch.dtype, float] = {E4M3: 448.0, E5M2: 57344.0}
"""The largest finite value of each format."""

BLOCK = 128  # of blockwise scales
MX_BLOCK = 32  # of microscaling formats
_FP32_MAX = torch.finfo(torch.float32).max
_EXPONENT, _MANTISSA, _EXPONENT_BITS = 0x7F800000, 0x007FFFFF, 23


@dataclass(frozen=True)
class Quantized:
    """A matrix [rows, k] in 8 bits, whose columns a product sums over.

    ``data``: E4M3 or E5M2. ``scales``: factors that give the values back, fp32: [] for the whole matrix, or one for
    each ``block`` (rows, columns) of it, [⌈rows/block rows⌉, ⌈k/block columns⌉]. Those of blocks of 32 are powers of
    two, kept as bytes (exponent + 127, 255 for NaN: E8M0).
    """

    data: Tensor
    scales: Tensor
    block: tuple[int, int] | None = None

    def transposed(self) -> Quantized:
        """The transposed matrix [k, rows] without new numbers; where blocks aren't square, no product sums over its
        columns.
        """
        if self.block is None:
            return replace(self, data=self.data.t())
        return Quantized(self.data.t(), self.scales.t(), self.block[::-1])

    def contiguous(self) -> Quantized:
        """A copy whose rows lie in memory one after the other, or this one if they do."""
        return (
            self
            if self.data.is_contiguous()
            else replace(self, data=bytes_of(self.data).contiguous().view(self.data.dtype))
        )

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values [rows, k] in fp32 or fp64, in which a code times a power of two is exact."""
        wide = values_of(self.data, dtype)
        factors = power_of_two(self.scales) if self.scales.dtype == torch.uint8 else self.scales
        if self.block is None:
            return wide * factors.to(dtype)
        rows, columns = wide.shape
        spread = factors.to(dtype).repeat_interleave(self.block[0], 0)[:rows]
        return wide * spread.repeat_interleave(self.block[1], 1)[:, :columns]


def values_of(data: Tensor, dtype: torch.dtype) -> Tensor:
    """The codes' values in fp32 or fp64. On a CPU from a table of them, five times as fast as torch's conversion."""
    if data.device.type != "cpu":
        return data.to(dtype)
    return torch.index_select(_table(data.dtype, dtype), 0, bytes_of(data).reshape(-1).int()).view(data.shape)


@functools.cache
def _table(fmt: torch.dtype, dtype: torch.dtype) -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(fmt).to(dtype)


def bytes_of(data: Tensor) -> Tensor:
    """The codes as bytes, for what torch can't do with 8-bit floats."""
    return data.view(torch.uint8)


def amax(x: Tensor) -> Tensor:
    """The largest magnitude in ``x``, fp32 []; 0 of nothing, NaN if there is one."""
    return x.detach().abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)


def scale_of(
    largest: Tensor, fmt: torch.dtype, *, of_input: torch.dtype = torch.float32, powers_of_two: bool = False
) -> Tensor:
    """What values of magnitude up to ``largest`` (fp32, any shape) are multiplied by to fill the format, fp32.

    1 where ``largest`` is 0, infinite or NaN. A scale that would be infinite becomes the largest finite number of the
    input's type. ``powers_of_two``: rounded down to one.
    """
    ceiling = min(torch.finfo(of_input).max, _FP32_MAX)
    full = torch.full_like(largest, LARGEST[fmt])
    scale = full / largest
    scale = torch.where(scale.isinf(), torch.full_like(scale, ceiling), scale)
    scale = torch.where(largest.isfinite() & (largest != 0), scale, torch.ones_like(scale))
    if powers_of_two:
        scale = (scale.view(torch.int32) & _EXPONENT).view(torch.float32)
    return scale


def to_codes(scaled: Tensor, fmt: torch.dtype) -> Tensor:
    """Round to the nearest code, ties to even; values beyond the format become its largest, NaN stays NaN. Overwrites
    ``scaled``.
    """
    limit = LARGEST[fmt]
    return scaled.clamp_(-limit, limit).to(fmt)


def with_scale(x: Tensor, scale: Tensor, fmt: torch.dtype) -> Quantized:
    """The matrix times one given ``scale``, fp32 []: tensorwise from the amax of now, delayed from those before."""
    return Quantized(to_codes(x * scale.view(1), fmt), scale.reciprocal())


def tensorwise(x: Tensor, fmt: torch.dtype, *, largest: Tensor | None = None) -> Quantized:
    """One scale for the matrix, from its ``largest`` magnitude: its own, or the one of all ranks that share it."""
    return with_scale(x, scale_of(amax(x) if largest is None else largest, fmt, of_input=x.dtype), fmt)


def blockwise(x: Tensor, fmt: torch.dtype, *, rows: int = 1) -> Quantized:
    """A power of two for each ``rows`` x 128 numbers (DeepSeek-V3, arXiv:2412.19437): 1 for activations and gradients,
    128 for weights. Blocks at the end may be smaller.
    """
    block = (rows, BLOCK)
    scale = scale_of(_amax_of_blocks(x, block), fmt, of_input=x.dtype, powers_of_two=True)
    return Quantized(to_codes(x * _spread(scale, block, x), fmt), scale.reciprocal(), block)


def mxfp8(x: Tensor, fmt: torch.dtype = E4M3) -> Quantized:
    """A power of two for each 32 numbers of a row (OCP microscaling formats, version 1.0), rounded up so that nothing
    is clamped.
    """
    block = (1, MX_BLOCK)
    exponents = mx_exponents(_amax_of_blocks(x, block), fmt)
    inverse = power_of_two((254 - exponents.int()).clamp(min=0).to(torch.uint8))
    return Quantized(to_codes(x * _spread(inverse, block, x), fmt), exponents, block)


def mx_exponents(largest: Tensor, fmt: torch.dtype = E4M3) -> Tensor:
    """Biased exponents (E8M0, uint8) of the scales of blocks with these ``largest`` magnitudes, fp32.

    The smallest power of two at or above ``largest`` divided by the largest value of the format; 0 stands for 2^-127.
    NaN gives 255, infinity 254.
    """
    # A division in fp32 by a number that isn't a power of two is what the kernels replace by this product.
    bits = (largest * largest.new_full((), 1.0 / LARGEST[fmt])).view(torch.int32)
    exponent, mantissa = (bits >> _EXPONENT_BITS) & 0xFF, bits & _MANTISSA
    rounds_up = (mantissa > 0) & ~((exponent == 0) & (mantissa <= 0x400000))  # no finite number reaches 254
    found = exponent + rounds_up.int()
    found = torch.where(largest.isinf(), torch.full_like(found, 254), found)
    return torch.where(largest.isnan(), torch.full_like(found, 255), found).to(torch.uint8)


def power_of_two(exponents: Tensor) -> Tensor:
    """2^(e - 127) in fp32 of biased exponents in bytes; NaN for 255. 2^-127 is a subnormal number."""
    wide = exponents.to(torch.int32)
    bits = torch.where(wide == 0, torch.full_like(wide, 0x00400000), wide << _EXPONENT_BITS)
    bits = torch.where(wide == 255, torch.full_like(wide, 0x7FC00000), bits)
    return bits.view(torch.float32)


def amax_of_part(part: Tensor, start: int, shape: tuple[int, int], block: tuple[int, int] | None) -> Tensor:
    """The largest magnitude, fp32 [], of a matrix of this ``shape``, or those of its blocks, of which only the elements
    from number ``start`` on are here, row by row: ``part`` [elements]. The others count as 0.
    """
    if block is None:
        return amax(part)
    found = part.new_zeros([-(-size // each) for size, each in zip(shape, block)], dtype=torch.float32)
    if part.numel():
        rows, first, _ = _rows_around(part, start, shape, block)
        blocks = _amax_of_blocks(rows, block)
        found[first : first + len(blocks)] = blocks
    return found


def codes_of_part(
    part: Tensor, start: int, shape: tuple[int, int], block: tuple[int, int] | None, scale: Tensor, fmt: torch.dtype
) -> Tensor:
    """The codes, as bytes [elements], of the elements that ``amax_of_part`` takes; ``scale``: what the matrix, or each
    of its blocks, is multiplied by.
    """
    if block is None:
        return bytes_of(to_codes(part * scale.view(1), fmt))
    rows, first, offset = _rows_around(part, start, shape, block)
    here = scale[first : first + -(-len(rows) // block[0])]
    codes = to_codes(rows * _spread(here, block, rows), fmt)
    return bytes_of(codes).flatten()[offset : offset + part.numel()]


def _rows_around(part: Tensor, start: int, shape: tuple[int, int], block: tuple[int, int]) -> tuple[Tensor, int, int]:
    """The rows of all blocks that ``part`` touches, with zeros around it; the number of the first of these rows of
    blocks; and where ``part`` begins among the elements.
    """
    of_blocks = block[0] * shape[1]
    first, stop = start // of_blocks, -(-(start + part.numel()) // of_blocks)
    around = part.new_zeros(min(stop * block[0], shape[0]) - first * block[0], shape[1])
    offset = start - first * of_blocks
    around.view(-1)[offset : offset + part.numel()] = part.detach()
    return around, first, offset


def _amax_of_blocks(x: Tensor, block: tuple[int, int]) -> Tensor:
    """The largest magnitude of each block, fp32."""
    (rows, columns), (high, wide) = x.shape, block
    padded = x.new_zeros(0, columns + -columns % wide)  # of no rows, which torch 2.9 doesn't pad
    if rows:
        padded = F.pad(x.detach().abs(), (0, -columns % wide, 0, -rows % high))
    return padded.view(padded.shape[0] // high, high, padded.shape[1] // wide, wide).amax((1, 3)).float()


def _spread(scale: Tensor, block: tuple[int, int], x: Tensor) -> Tensor:
    """A block's number for each of its elements."""
    rows, columns = x.shape
    return scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
