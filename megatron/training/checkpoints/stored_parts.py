"""This rank's part of the scales of a quantized weight."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.checkpointing.boxes import boxes
from megatron.core.conversion.portable import LazyScales
from megatron.core.inference.stored_weights import StoredScales
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.sharding import Sharding
from megatron.core.quantization.grid import Grid


def part_of(scales: LazyScales, grid: Grid, weight: Tensor, sharding: Sharding, mesh: Mesh) -> StoredScales:
    """The scales of this rank's part ``weight`` [out, in] of a weight."""
    outputs, inputs = weight.shape
    factors, zeros = scales.factors.make(), None if scales.zeros is None else scales.zeros.make()
    grid = Grid(grid.kind, grid.bits, (1, grid.block[1]), grid.symmetric)  # scales have a row for each output
    rows, first = torch.zeros(outputs, dtype=torch.long), 0
    for box in boxes(sharding, mesh):
        at, count = box.start // inputs, box.sizes[0]
        rows[at : at + count] = torch.arange(box.offsets[0], box.offsets[0] + count)
        first = box.offsets[1]
    places = None if scales.groups is None else scales.groups.make().long()[first : first + inputs]
    if places is None and factors.shape[1] > 1:
        group = grid.block[1]
        columns = slice(first // group, -(-(first + inputs) // group))
        factors, zeros = factors[:, columns], None if zeros is None else zeros[:, columns]
        if first % group:
            places = torch.arange(first, first + inputs) // group - first // group
    return StoredScales(grid, factors[rows].contiguous(), None if zeros is None else zeros[rows].contiguous(), places)
