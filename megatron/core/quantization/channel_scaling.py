"""Factors of input channels that make a matrix, or its inputs, easier to round: AWQ and SmoothQuant.

A matrix is multiplied by the factors of its inputs, which are divided by them where they come from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.quantization.grid import Grid, Scales, codes_of, scales_of, values_of_codes

_EXPONENTS = 20  # steps between exponents 0 and 1 that are tried
_RATIOS = tuple(1 - step / 20 for step in range(11))  # of the largest magnitude that fit the grid, 1 to 0.5
_LEAST = 1e-4  # of the largest mean magnitude: channels below don't get larger factors


def output_error(change: Tensor, hessian: Tensor) -> Tensor:
    """The mean square of what ``change`` [out, in] of a matrix does to its outputs, summed over them, fp64."""
    change = change.double()
    return (change @ hessian * change).sum()


def rounded_with(weight: Tensor, scales: Scales, grid: Grid) -> Tensor:
    """``weight`` [out, in] after a way to codes and back, fp32."""
    return values_of_codes(codes_of(weight, scales, grid), scales, grid).float()


def activation_aware_factors(
    matrices: Sequence[tuple[Tensor, Tensor]], mean_magnitudes: Tensor, grid: Grid, *, dtype: torch.dtype
) -> Tensor:
    """AWQ's factors (arXiv:2306.00978) [in], fp32, of matrices with the same inputs: a power of the ``mean_magnitudes``
    [in] of these, the one with the least error of outputs. ``matrices``: each with its mean of x·xᵀ.
    """
    magnitudes = mean_magnitudes.clamp(min=float(mean_magnitudes.max()) * _LEAST)
    best, least = torch.ones_like(magnitudes).float(), torch.tensor(float("inf"), dtype=torch.float64)
    if not float(magnitudes.max()) > 0:
        return best
    for step in range(_EXPONENTS + 1):
        powers = magnitudes ** (step / _EXPONENTS)
        factors = (powers / (powers.max() * powers.min()).sqrt()).float()
        error = torch.zeros((), dtype=torch.float64)
        for weight, hessian in matrices:
            scaled = weight.float() * factors
            change = rounded_with(scaled, scales_of(scaled, grid, dtype), grid) / factors - weight
            error += output_error(change, hessian).cpu()
        if error < least:
            best, least = factors, error
    return best


def smoothing_factors(largest: Tensor, weights: Sequence[Tensor], *, exponent: float) -> Tensor:
    """SmoothQuant's factors (arXiv:2211.10438) [in], fp32: ``largest`` magnitudes of inputs to the power of
    ``exponent``, over those of the weights [out, in] to the power of the rest.
    """
    of_weights = torch.stack([weight.float().abs().amax(0) for weight in weights]).amax(0)
    found = largest.float() ** exponent / of_weights.clamp(min=1e-5) ** (1 - exponent)
    return torch.where(largest > 0, found.clamp(min=1e-5), torch.ones_like(found))


def clipped_scales(weight: Tensor, hessian: Tensor, grid: Grid, *, dtype: torch.dtype) -> Scales:
    """Scales of the groups of ``weight`` [out, in] with which its largest numbers may be cut, where that makes the
    error of the group's part of the output less.
    """
    whole, inputs = scales_of(weight, grid, dtype), weight.shape[1]
    group = grid.block[1] or inputs
    blocks = hessian.view(inputs // group, group, inputs // group, group).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    best, least = whole, torch.full(whole.factors.shape, float("inf"), dtype=torch.float64).to(hessian)
    for ratio in _RATIOS:
        tried = dataclasses.replace(whole, factors=(whole.factors.float() * ratio).to(dtype))
        change = (rounded_with(weight, tried, grid) - weight).double().view(len(weight), -1, group)
        error = (torch.einsum("ogi,gij->ogj", change, blocks) * change).sum(-1)
        better = error < least
        best = dataclasses.replace(best, factors=torch.where(better, tried.factors, best.factors))
        least = torch.where(better, error, least)
    return best
