"""Choosing codes by what inputs are: exact sums, and less error of outputs than rounding has."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from megatron.core.quantization.channel_scaling import (
    activation_aware_factors,
    clipped_scales,
    output_error,
    rounded_with,
    smoothing_factors,
)
from megatron.core.quantization.gptq import gptq
from megatron.core.quantization.grid import codes_of, rounded, scales_of, values_of_codes
from megatron.core.quantization.scheme import scheme_named
from megatron.core.quantization.statistics import InputStatistics


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


INPUTS = random(300, 64, seed=1) @ (random(64, 64, seed=2) * torch.linspace(0.1, 3, 64))
WEIGHT = random(48, 64, seed=3)


def statistics(*parts: Tensor) -> InputStatistics:
    """Statistics of inputs in parts, as several ranks or samples have them."""
    found = InputStatistics.of_width(64, torch.device("cpu"))
    for each in parts:
        found.measure(each)
    found.begin_sums()
    for each in parts:
        found.add(each)
    return found


def test_sums_don_t_depend_on_order_or_division() -> None:
    """Or each number of ranks would give other codes, where two are nearly as good."""
    whole, parts = statistics(INPUTS), statistics(*reversed(torch.split(INPUTS, 7)))
    assert torch.equal(whole.hessian(), parts.hessian())
    assert torch.equal(whole.mean_magnitudes(), parts.mean_magnitudes())
    mean = INPUTS.double().t() @ INPUTS.double() / 300
    torch.testing.assert_close(whole.hessian(), mean, atol=1e-4 * float(mean.abs().max()), rtol=0)
    torch.testing.assert_close(whole.mean_magnitudes(), INPUTS.double().abs().mean(0), rtol=1e-4, atol=0)
    factors = torch.linspace(0.5, 2, 64)
    whole.divide(factors)
    scaled = INPUTS.double() / factors
    torch.testing.assert_close(
        whole.hessian(), scaled.t() @ scaled / 300, atol=1e-4 * float((scaled.t() @ scaled / 300).max()), rtol=0
    )


@pytest.mark.parametrize("name", ["int4", "int3", "int4-asym", "int8"])
def test_methods_beat_rounding(name: str) -> None:
    """In the error of outputs on the inputs that they have seen; codes and scales are those of the grid."""
    group = None if name == "int8" else 16
    grid, seen = scheme_named(name, group_size=group).weights, statistics(INPUTS)
    hessian = seen.hessian()
    by_rounding = float(output_error(rounded(WEIGHT, grid) - WEIGHT, hessian))
    for orders, least in ((False, 0.9), (True, 0.6)):
        codes, scales = gptq(WEIGHT, hessian, grid, dtype=torch.float32, orders=orders)
        assert scales.factors.shape == grid.scales_shape((48, 64)) and codes.dtype == torch.int8
        values = values_of_codes(codes, scales, grid)
        assert torch.equal(codes_of(values, scales, grid), codes)
        assert float(output_error(values - WEIGHT, hessian)) < least * by_rounding
    factors = activation_aware_factors([(WEIGHT, hessian)], seen.mean_magnitudes(), grid, dtype=torch.float32)
    scaled = WEIGHT * factors
    seen.divide(factors)
    cut = clipped_scales(scaled, seen.hessian(), grid, dtype=torch.float32)
    error = float(output_error(rounded_with(scaled, cut, grid) - scaled, seen.hessian()))
    assert error < 0.95 * by_rounding


def test_gptq_without_correlations_is_rounding() -> None:
    """Inputs that have nothing to do with each other leave nothing to make up for, and those that are always zero
    neither.
    """
    grid = scheme_named("int4", group_size=16).weights
    hessian = torch.diag(torch.linspace(0.0, 5, 64)).double()
    codes, scales = gptq(WEIGHT, hessian, grid, dtype=torch.float32)
    expected = scales_of(WEIGHT, grid)
    assert torch.equal(scales.factors, expected.factors)
    assert torch.equal(codes, codes_of(WEIGHT, expected, grid))


def test_gptq_minimizes_the_error_of_two_columns() -> None:
    """By hand: the second column takes what the first one's rounding has left, times their correlation."""
    grid = dataclasses.replace(scheme_named("int4").weights, block=(1, 0))
    hessian = torch.tensor([[1.0, 0.9], [0.9, 1.0]]).double()
    weight = torch.tensor([[3.45, 0.4, 7.0]])  # the last one gives the scale 1
    hessian = torch.nn.functional.pad(hessian, (0, 1, 0, 1))
    hessian[2, 2] = 1.0
    codes, _ = gptq(weight, hessian, grid, dtype=torch.float32)
    # 3.45 -> 3 leaves 0.45; 0.4 + 0.45·0.9/1.01 = 0.80 -> 1, where rounding gives 0.
    assert codes.tolist() == [[3, 1, 7]]


def test_smoothing_moves_the_range_of_inputs_to_weights() -> None:
    """With the exponent 0.5 both have the same range afterwards; channels without inputs stay."""
    largest = INPUTS.abs().amax(0)
    largest[5] = 0.0
    factors = smoothing_factors(largest, [WEIGHT], exponent=0.5)
    assert factors[5] == 1.0
    after = (WEIGHT * factors).abs().amax(0), largest / factors
    keep = largest > 0
    torch.testing.assert_close(after[0][keep], after[1][keep])
