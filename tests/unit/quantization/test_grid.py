"""Codes, scales and values: the nearest number of the grid, for every kind of scale."""

from __future__ import annotations

import pytest
import torch

from megatron.core.quantization.grid import Grid, Scales, codes_of, rounded, scales_of, values_of_codes
from megatron.core.quantization.scheme import SCHEMES, scheme_named
from megatron.errors import ConfigError
from tests.harness.sentences import expect_error


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_the_nearest(name: str, dtype: torch.dtype) -> None:
    """And a weight on the grid stays where it is, so that quantizing twice changes nothing."""
    grid = SCHEMES[name].weights
    weight = torch.randn(130, 256, generator=torch.Generator().manual_seed(1))
    scales = scales_of(weight, grid, dtype)
    assert scales.factors.shape == grid.scales_shape((130, 256))
    codes = codes_of(weight, scales, grid)
    values = values_of_codes(codes, scales, grid, torch.float32)
    assert torch.equal(codes_of(values, scales, grid).float(), codes.float())
    step = scales.factors.float().max()
    if grid.kind == "int":
        # A scale that is rounded down to bf16 leaves the largest number of its block up to 1/256 beyond the last code.
        beyond = 0 if dtype == torch.float32 else 2.0**grid.bits / 256
        assert (values - weight).abs().max() <= step * (0.5 + beyond) * (1 + 1e-6)
    else:
        assert ((values - weight).abs() <= torch.maximum(weight.abs() / 16, step / 1024) * 1.001 + step * 2).all()


def test_scales_are_those_of_their_block() -> None:
    """A large number takes precision from its own block alone."""
    weight = torch.ones(4, 8)
    weight[3, 7] = 127.0
    grid = Grid("int", 8, (2, 4))
    factors = scales_of(weight, grid).factors
    assert torch.equal(factors, torch.tensor([[1 / 127, 1 / 127], [1 / 127, 1.0]]))
    assert torch.equal(rounded(weight, grid), weight)


def test_odd_sizes_and_zeros() -> None:
    """Blocks that stick out of the weight, and a weight of zeros."""
    weight = torch.zeros(3, 5)
    weight[2, 4] = 2.0
    grid = Grid("float", 8, (2, 4))
    assert scales_of(weight, grid).factors.shape == (2, 2)
    assert torch.equal(rounded(weight, grid), weight)


def test_zero_points() -> None:
    """Zero itself stays zero where the grid isn't symmetric, also when all numbers are on one side of it."""
    grid = Grid("int", 4, (1, 4), symmetric=False)
    weight = torch.tensor([[0.0, 1.0, 2.0, 3.0], [-1.0, -2.0, -3.0, 0.0]])
    scales = scales_of(weight, grid)
    assert scales.zeros is not None and scales.zeros.tolist() == [[-8], [7]]
    assert torch.equal(codes_of(weight, scales, grid), torch.tensor([[-8, -3, 2, 7], [2, -3, -8, 7]], dtype=torch.int8))
    assert torch.allclose(values_of_codes(codes_of(weight, scales, grid), scales, grid), weight)


def test_what_is_too_large_becomes_the_largest() -> None:
    """Also in FP8, whose cast gives NaN."""
    for grid in (Grid("int", 4, (1, 0)), Grid("float", 8, (1, 0))):
        codes = codes_of(torch.tensor([[1e6, -1e6]]), Scales(torch.ones(1, 1)), grid)
        assert codes.float().tolist() == [[grid.highest, grid.lowest]]


def test_group_sizes() -> None:
    """Those that don't divide are refused with those that do, and where scales aren't of groups there are none."""
    scheme_named("int4", group_size=32).weights.check_divides((8, 96), "q_proj")
    with expect_error(ConfigError, "--group-size 128", "96", "q_proj", "16", "32"):
        scheme_named("int4").weights.check_divides((8, 96), "q_proj")
    with expect_error(ConfigError, "--group-size 64", "fp8"):
        scheme_named("fp8", group_size=64)
