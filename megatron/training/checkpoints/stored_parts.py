"""This rank's part of the scales of a quantized weight."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron.core.checkpointing.boxes import Box, boxes
from megatron.core.conversion.portable import LazyScales
from megatron.core.inference.stored_weights import StoredScales
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.sharding import Sharding
from megatron.core.quantization.grid import Grid


def part_of(scales: LazyScales, grid: Grid, weight: Tensor, sharding: Sharding, mesh: Mesh) -> StoredScales:
    """The scales of this rank's part ``weight`` [..., in] of a weight, whose dimensions but the last are its rows."""
    inputs = weight.shape[-1]
    factors, zeros = (None if each is None else each.make().flatten(0, -2) for each in (scales.factors, scales.zeros))
    assert factors is not None, "scales have factors"
    grid = Grid(grid.kind, grid.bits, (1, grid.block[1]), grid.symmetric)  # scales have a row for each output
    rows, first = torch.zeros(math.prod(weight.shape[:-1]), dtype=torch.long), 0
    for box in boxes(sharding, mesh):
        here, there = _rows_of(box, sharding.shape, inputs)
        rows[here] = there
        first = box.offsets[-1]
    places = None if scales.groups is None else scales.groups.make().long()[first : first + inputs]
    if places is None and factors.shape[1] > 1:
        group = grid.block[1]
        columns = slice(first // group, -(-(first + inputs) // group))
        factors, zeros = factors[:, columns], None if zeros is None else zeros[:, columns]
        if first % group:
            places = torch.arange(first, first + inputs) // group - first // group
    return StoredScales(grid, factors[rows].contiguous(), None if zeros is None else zeros[rows].contiguous(), places)


def _rows_of(box: Box, shape: tuple[int, ...], inputs: int) -> tuple[Tensor, Tensor]:
    """The rows of a box among those of the rank's part, and among those of the whole weight of this ``shape``."""
    here, there = torch.tensor([box.start // inputs]), torch.zeros(1, dtype=torch.long)
    for dim, size in enumerate(box.sizes[:-1]):
        steps = torch.arange(size)
        here = (here.unsqueeze(1) + steps * (box.strides[dim] // inputs)).flatten()
        there = (there.unsqueeze(1) * shape[dim] + box.offsets[dim] + steps).flatten()
    return here, there


def of_each_expert(scales: StoredScales, experts: int) -> list[StoredScales]:
    """The scales of the matrices of a stacked weight."""
    factors = scales.factors.chunk(experts)
    zeros = [None] * experts if scales.zeros is None else scales.zeros.chunk(experts)
    return [StoredScales(scales.grid, *each, scales.groups) for each in zip(factors, zeros, strict=True)]
