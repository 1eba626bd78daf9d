"""Products of rounded weights, and inputs, in the model's type: what quantization-aware training multiplies.

Scales are those of the logical weights, as an export finds them, at any layout: where ranks divide the inputs of a
group, they agree on its extremes. They are found once a step. No weight lies outside of the range of its scale, so the
straight-through gradient is that of the rounded weight, all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from megatron.core.parallel.collectives import all_reduce
from megatron.core.parallel.grid import Axis
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.operands import Grouping, Operands
from megatron.core.parallel.sharding import sharding_of
from megatron.core.quantization.grid import (
    Grid,
    Scales,
    codes_of,
    extremes,
    scales_of_extremes,
    values_of_codes,
)
from megatron.core.quantization.scheme import Scheme


@dataclass(frozen=True)
class _Part:
    """This rank's columns of a weight: ``before`` columns of their first group are other ranks'."""

    group: int
    axis: Axis | None
    first_group: int = 0
    before: int = 0
    groups: int = 1


class FakeQuantized(Operands):
    """Operands rounded to ``scheme``, whose scales belong to rows of weights. ``mesh``: of the ranks."""

    replaces = True

    def __init__(self, scheme: Scheme, mesh: Mesh) -> None:
        self._scheme, self._mesh = scheme, mesh
        self._is_by_matrix = scheme.weights.block == (0, 0)
        # Scales are held by row, also where all rows of a matrix share one.
        self._grid = replace(scheme.weights, block=(1, 0)) if self._is_by_matrix else scheme.weights
        self._kept: dict[Tensor, Scales] | None = None

    @override
    def weight(self, weight: Tensor) -> Callable[[], Tensor]:
        """The weight on the grid. May be a collective of the ranks that divide its inputs."""
        kept = self._kept
        scales = None if kept is None else kept.get(weight)
        if scales is None:
            part = self._part(weight)
            matrix = weight.detach().flatten(0, -2)
            scales = self._scale_of_matrices(weight) if self._is_by_matrix else self._scales(matrix, part)
            if kept is not None:
                kept[weight] = scales
        return partial(self._rounded, weight, scales)

    @override
    def rows(self, rows: Tensor, weight: Tensor, grouping: Grouping | None = None) -> Tensor:
        """The input with a scale for each token, where the scheme has activations in 8 bits.

        That of a tensor depends on which tokens are multiplied together; calibration finds it after training.
        """
        if self._scheme.activations is None:
            return rows
        grid = replace(self._grid, block=(1, 0))
        flat = rows.detach().flatten(0, -2)
        scales = self._scales(flat, _Part(0, self._part(weight).axis), grid)
        rounded = values_of_codes(codes_of(flat, scales, grid), scales, grid).to(rows.dtype).view_as(rows)
        found: Tensor = _StraightThrough.apply(rows, rounded)  # type: ignore[no-untyped-call]
        return found

    @override
    @contextmanager
    def step(self) -> Iterator[None]:
        """Keep the scales of weights in the block, in which no weight changes."""
        self._kept = {}
        try:
            yield
        finally:
            self._kept = None

    def _part(self, weight: Tensor) -> _Part:
        sharding, width = sharding_of(weight), weight.shape[-1]
        axis, group = sharding.split.get(weight.dim() - 1), self._scheme.weights.block[1]
        if axis is None or self._mesh.size(axis) == 1:
            return _Part(group, None)
        if not group or width % group == 0:
            return _Part(group, None if group else axis)
        first = width * self._mesh.rank(axis)
        return _Part(group, axis, first // group, first % group, sharding.shape[-1] // group)

    def _scales(self, matrix: Tensor, part: _Part, grid: Grid | None = None) -> Scales:
        """Scales of the local columns [out, in] of a weight."""
        grid = grid or self._grid
        low, high = extremes(_padded(matrix, part).float(), grid)
        held = slice(0, low.shape[1])
        if part.axis is not None:
            held = slice(part.first_group, part.first_group + low.shape[1])
            both = low.new_zeros(2, len(low), max(part.groups, held.stop))
            both[0, :, held], both[1, :, held] = -low, high
            both = all_reduce(both, self._mesh, part.axis, op="max")
            low, high = -both[0, :, held], both[1, :, held]
        return scales_of_extremes(low, high, grid, grid.scales_dtype(matrix.dtype))

    def _scale_of_matrices(self, weight: Tensor) -> Scales:
        """The one scale of the whole weight, or of each expert's, in each of the rows here. May be a collective."""
        has_experts = weight.dim() > 2
        peaks = weight.detach().float().view(len(weight) if has_experts else 1, -1).abs().amax(1)
        for dim, axis in sharding_of(weight).split.items():
            if self._mesh.size(axis) > 1 and not (has_experts and dim == 0):
                peaks = all_reduce(peaks, self._mesh, axis, op="max")
        peaks = peaks.unsqueeze(1)
        factors = scales_of_extremes(-peaks, peaks, self._grid, self._grid.scales_dtype(weight.dtype)).factors
        rows = weight.numel() // weight.shape[-1] // len(factors)
        return Scales(factors.repeat_interleave(rows, 0))

    def _rounded(self, weight: Tensor, scales: Scales) -> Tensor:
        grid, part = self._grid, self._part(weight)
        matrix = _padded(weight.detach().flatten(0, -2), part)
        values = values_of_codes(codes_of(matrix, scales, grid), scales, grid)
        return values[:, part.before : part.before + weight.shape[-1]].to(weight.dtype).reshape(weight.shape)


def _padded(matrix: Tensor, part: _Part) -> Tensor:
    """The columns with zeros for those of their first and last group that other ranks hold: zero is in every range."""
    after = -(part.before + matrix.shape[1]) % part.group if part.group and part.axis is not None else 0
    return F.pad(matrix, (part.before, after)) if part.before or after else matrix


class _StraightThrough(torch.autograd.Function):
    """``rounded`` in place of ``x``, whose gradient is that of ``rounded``."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, rounded: Tensor) -> Tensor:
        return rounded

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
