"""GPTQ (arXiv:2210.17323): columns are rounded one after the other, and later ones make up for the error of each."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from megatron.core.quantization.grid import Grid, Scales, codes_of, scales_of, values_of_codes

_BLOCK = 128  # columns whose errors reach those behind them in one product
_DAMPING = 0.01  # of the mean of the diagonal, added to it


def gptq(
    weight: Tensor, hessian: Tensor, grid: Grid, *, dtype: torch.dtype, orders: bool = False
) -> tuple[Tensor, Scales]:
    """Codes [out, in] and scales of ``weight`` [out, in] whose products with its inputs change least.

    ``hessian`` [in, in]: the mean of x·xᵀ, fp64. ``dtype``: of the scales. Scales of a group are those of its columns
    when their turn comes, after they have made up for earlier errors. ``orders``: inputs with the largest mean squares
    come first; scales are then those of the weight as it was, so that groups remain of neighbouring inputs.
    """
    inputs = weight.shape[1]
    hessian = hessian.clone()
    diagonal = hessian.diagonal()
    diagonal[diagonal == 0] = 1.0  # inputs that are always zero: nothing depends on their columns
    order = torch.argsort(diagonal, descending=True, stable=True) if orders else torch.arange(inputs)
    order = order.to(weight.device)
    left, upper = weight.double()[:, order], _upper(hessian[order][:, order])
    group = grid.block[1] or inputs
    fixed = scales_of(weight, grid, dtype) if orders else None
    by_column = dataclasses.replace(grid, block=(1, 0))
    codes = torch.empty_like(weight, dtype=grid.dtype)
    made = list[Scales]()
    for first in range(0, inputs, _BLOCK):
        last = min(first + _BLOCK, inputs)
        errors = left.new_zeros(len(left), last - first)
        for at in range(first, last):
            if fixed is None and at % group == 0:
                made.append(scales_of(left[:, at : at + group], by_column, dtype))
            scales = made[-1] if fixed is None else _column(fixed, int(order[at]) // group)
            column = left[:, at : at + 1]
            rounded = codes_of(column, scales, by_column)
            codes[:, order[at]] = rounded[:, 0]
            error = (column - values_of_codes(rounded, scales, by_column).double()) / upper[at, at]
            left[:, at:last] -= error @ upper[at : at + 1, at:last]
            errors[:, at - first] = error[:, 0]
        left[:, last:] -= errors @ upper[first:last, last:]
    return codes, fixed or _joined(made)


def _upper(hessian: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse of the damped Hessian."""
    damped = hessian + _DAMPING * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=hessian.dtype).to(hessian)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    upper: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return upper


def _column(scales: Scales, number: int) -> Scales:
    zeros = scales.zeros
    column = slice(number, number + 1)
    return Scales(scales.factors[:, column], None if zeros is None else zeros[:, column])


def _joined(columns: list[Scales]) -> Scales:
    zeros = [each.zeros for each in columns if each.zeros is not None]
    return Scales(torch.cat([each.factors for each in columns], 1), torch.cat(zeros, 1) if zeros else None)
