"""Weights in few bits: grids of numbers, their scales, and values to and from codes.

A weight is a logical matrix [out, in]; its scales are a matrix, too: [1, 1] for the whole weight, [out, 1] for each
output, [out, ⌈in/group⌉] for groups of inputs, [⌈out/rows⌉, ⌈in/columns⌉] for blocks. So whatever moves rows of a
weight (a mapping table, tensor parallelism) moves those of its scales. All arithmetic is in fp32, rounds half to even,
and doesn't depend on layout or device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron.core.ops.quantize import E4M3, LARGEST
from megatron.errors import ConfigError


@dataclass(frozen=True)
class Grid:
    """Numbers that quantized values may have, and which of them share a scale.

    ``kind``: two's complement integers of ``bits``, or floats (8 bits: E4M3). ``block``: rows and columns that share a
    scale, 0 for all of them: (0, 0) the tensor, (1, 0) an output (channel), (1, 128) a group of inputs, (128, 128) a
    block. ``symmetric``: zero is the code 0; else each scale has a zero point, the code of zero.
    """

    kind: Literal["int", "float"]
    bits: int
    block: tuple[int, int]
    symmetric: bool = True

    @property
    def lowest(self) -> float:
        """The smallest code."""
        return -(2.0 ** (self.bits - 1)) if self.kind == "int" else -LARGEST[E4M3]

    @property
    def highest(self) -> float:
        """The largest code."""
        return 2.0 ** (self.bits - 1) - 1 if self.kind == "int" else LARGEST[E4M3]

    @property
    def dtype(self) -> torch.dtype:
        """Type of codes, one a number, as they are before files pack them."""
        return torch.int8 if self.kind == "int" else E4M3

    def scales_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Type of the scales of a weight of type ``dtype``: fp32 for floats, as programs expect, else at most fp32."""
        return torch.float32 if self.kind == "float" or dtype.itemsize > 4 else dtype

    def sides(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of a weight of ``shape`` that share a scale."""
        rows, columns = (side or size for side, size in zip(self.block, shape, strict=True))
        return rows, columns

    def scales_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Shape of the scales of a weight of ``shape``."""
        rows, columns = (-(-size // side) for size, side in zip(shape, self.sides(shape), strict=True))
        return rows, columns

    def check_divides(self, shape: tuple[int, int], name: str, *, others: Iterable[int] = ()) -> None:
        """Raise ConfigError for a weight whose inputs are no whole number of groups, with group sizes that fit.

        ``others``: numbers of inputs of the other weights, which a group size must fit, too.
        """
        rows, group = self.block
        if rows != 1 or not group or shape[1] % group == 0:
            return
        widths = {shape[1], *others}
        fits = [str(size) for size in (128, 64, 32, 16, 8) if all(width % size == 0 for width in widths)]
        alone = [str(size) for size in (128, 64, 32, 16, 8) if shape[1] % size == 0]
        advice = "only one scale for each output fits, which int8 has"
        if fits:
            advice = f"--group-size {' or '.join(fits)} divides those of all weights"
        elif alone:
            advice = f"--group-size {' or '.join(alone)} divides them, and no usual size those of all weights"
        raise ConfigError(f"--group-size {group} doesn't divide the {shape[1]} inputs of {name}; {advice}")


@dataclass(frozen=True)
class Scales:
    """Factors of codes. ``factors``: [rows, columns] in the type that files keep, all above zero. ``zeros``: the codes
    of zero, int8, where the grid isn't symmetric.
    """

    factors: Tensor
    zeros: Tensor | None = None


def scales_of(weight: Tensor, grid: Grid, dtype: torch.dtype = torch.float32) -> Scales:
    """The scales with which the largest numbers of ``weight`` [out, in] just fit the grid, rounded to ``dtype``.

    Blocks of zeros have the scale 1.
    """
    return scales_of_extremes(*extremes(weight.detach().float(), grid), grid, dtype)


def scales_of_extremes(low: Tensor, high: Tensor, grid: Grid, dtype: torch.dtype) -> Scales:
    """The scales of blocks whose smallest and largest numbers are ``low`` and ``high``, fp32 [rows, columns]."""
    if grid.symmetric:
        return Scales(_positive(torch.maximum(-low, high) / grid.highest, dtype))
    low, high = low.clamp(max=0), high.clamp(min=0)
    factors = _positive((high - low) / (grid.highest - grid.lowest), dtype)
    zeros = torch.round(grid.lowest - low / factors.float()).clamp(grid.lowest, grid.highest)
    return Scales(factors, zeros.to(torch.int8))


def codes_of(weight: Tensor, scales: Scales, grid: Grid) -> Tensor:
    """``weight`` [out, in] on the grid: the nearest codes, of ``grid.dtype``; what is too large becomes the largest."""
    factors, zeros = _spread(scales, grid, weight)
    codes = weight.detach().float() / factors
    if grid.kind == "int":
        codes = torch.round(codes) if zeros is None else torch.round(codes) + zeros
    return codes.clamp(grid.lowest, grid.highest).to(grid.dtype)


def values_of_codes(codes: Tensor, scales: Scales, grid: Grid, dtype: torch.dtype | None = None) -> Tensor:
    """The values [out, in] of codes, multiplied and rounded in ``dtype``: that of the factors unless given."""
    factors, zeros = _spread(scales, grid, codes, dtype=dtype or scales.factors.dtype)
    values = codes.to(factors.dtype)
    return (values if zeros is None else values - zeros.to(factors.dtype)) * factors


def rounded(weight: Tensor, grid: Grid, dtype: torch.dtype = torch.float32) -> Tensor:
    """``weight`` [out, in] after a way to codes and back, in its own type. ``dtype``: that of the scales."""
    scales = scales_of(weight, grid, dtype)
    return values_of_codes(codes_of(weight, scales, grid), scales, grid, torch.float32).to(weight.dtype)


def extremes(weight: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """The smallest and the largest number of each block."""
    rows, columns = grid.sides((weight.shape[0], weight.shape[1]))
    missing = (-weight.shape[1] % columns, -weight.shape[0] % rows)
    if any(missing):
        weight = torch.nn.functional.pad(weight, (0, missing[0], 0, missing[1]))
    blocks = weight.view(weight.shape[0] // rows, rows, weight.shape[1] // columns, columns)
    return blocks.amin((1, 3)), blocks.amax((1, 3))


def _positive(factors: Tensor, dtype: torch.dtype) -> Tensor:
    stored = factors.to(dtype)
    return torch.where(stored > 0, stored, torch.ones_like(stored))


def _spread(
    scales: Scales, grid: Grid, values: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor | None]:
    """Factors and zero points for each number; a dimension that one scale covers stays 1."""
    shape = (values.shape[0], values.shape[1])

    def spread(found: Tensor) -> Tensor:
        for dim, (side, size) in enumerate(zip(grid.sides(shape), shape, strict=True)):
            if found.shape[dim] > 1:
                found = found.repeat_interleave(side, dim).narrow(dim, 0, size)
        return found

    zeros = None if scales.zeros is None else spread(scales.zeros.float())
    return spread(scales.factors.to(dtype)), zeros
