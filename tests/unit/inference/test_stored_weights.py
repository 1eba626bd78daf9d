"""Weights in the bits of their grid: products are those of the dequantized weight, at every layout of scales."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.core.inference.products import INT8, GenerationProducts
from megatron.core.inference.stored_weights import (
    Room,
    StoredInt4,
    StoredInt8,
    StoredParts,
    StoredScales,
    stored_form,
)
from megatron.core.quantization.grid import Grid, codes_of, scales_of, values_of_codes

GRIDS = {
    "int8": Grid("int", 8, (1, 0)),
    "int8 in groups": Grid("int", 8, (1, 32)),
    "int4": Grid("int", 4, (1, 32)),
    "int4 in small groups": Grid("int", 4, (1, 8)),
    "int4 with zero points": Grid("int", 4, (1, 32), symmetric=False),
    "fp8": Grid("float", 8, (1, 0)),
    "int2 in groups": Grid("int", 2, (1, 32)),
    "fp8 in groups": Grid("float", 8, (1, 128)),
}


def on_grid(grid: Grid, dtype: torch.dtype, shape: tuple[int, int] = (48, 160)) -> tuple[nn.Parameter, StoredScales]:
    """A weight whose numbers are those of codes, also the largest and smallest, in ``dtype``."""
    wide = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    scales = scales_of(wide, grid, dtype)
    values = values_of_codes(codes_of(wide, scales, grid), scales, grid, dtype)
    return nn.Parameter(values, requires_grad=False), StoredScales(grid, scales.factors, scales.zeros)


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_the_numbers(name: str, dtype: torch.dtype) -> None:
    """Codes that are taken from rounded numbers must be the ones that were stored, whatever the scales are."""
    weight, scales = on_grid(GRIDS[name], dtype)
    form = stored_form(weight, scales, Room())
    bias = torch.randn(48, generator=torch.Generator().manual_seed(4)).to(dtype)
    multiply = GenerationProducts(is_batch_invariant=False, stored={id(weight): form})
    x = torch.randn(5, 160, generator=torch.Generator().manual_seed(5)).to(dtype)
    expected = (x.double() @ weight.double().t() + bias.double()).float()
    exact = 1e-4 if dtype == torch.float32 else 1e-2
    assert (multiply(x, weight, bias).float() - expected).norm() <= exact * expected.norm()
    multiply.release([weight])
    assert weight.isnan().all() and (multiply(x, weight, bias).float() - expected).norm() <= exact * expected.norm()


def test_the_fastest_form_that_fits() -> None:
    """torch's products where they work, and parts for everything else."""
    kinds = {name: type(stored_form(*on_grid(grid, torch.bfloat16), Room())) for name, grid in GRIDS.items()}
    has_int8 = INT8.refusal(torch.empty(0, 0, dtype=torch.bfloat16)) is None
    has_int4 = (
        StoredInt4(on_grid(GRIDS["int4"], torch.bfloat16)[1]).refusal(torch.empty(0, dtype=torch.bfloat16)) is None
    )
    assert kinds.pop("int8") is (StoredInt8 if has_int8 else StoredParts)
    assert {kinds.pop("int4"), kinds.pop("int4 with zero points")} == {StoredInt4 if has_int4 else StoredParts}
    assert set(kinds.values()) == {StoredParts}


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_rows_have_the_same_bits_in_any_batch(name: str) -> None:
    """A text must not depend on what else is served."""
    weight, scales = on_grid(GRIDS[name], torch.bfloat16)
    multiply = GenerationProducts(is_batch_invariant=True, stored={id(weight): stored_form(weight, scales, Room())})
    x = torch.randn(9, 160, generator=torch.Generator().manual_seed(5)).bfloat16()
    together = multiply(x, weight, None)
    assert all(torch.equal(multiply(x[row : row + 1], weight, None)[0], together[row]) for row in range(9))


def test_groups_that_do_not_begin_with_the_part() -> None:
    """A rank's part of the inputs may begin inside a group."""
    grid = Grid("int", 4, (1, 32))
    weight, scales = on_grid(grid, torch.float32)
    part = nn.Parameter(weight[:, 40:120].clone(), requires_grad=False)
    groups = torch.arange(40, 120) // 32 - 1
    own = StoredScales(grid, scales.factors[:, 1:4], None, groups)
    form = stored_form(part, own, Room())
    x = torch.randn(2, 80, generator=torch.Generator().manual_seed(6))
    assert isinstance(form, StoredParts)
    assert torch.allclose(form.multiply(x, form.pack(part), None), x @ part.t(), atol=1e-4)


def test_memory_is_that_of_the_bits() -> None:
    """4 bits take a quarter of bf16, and 8 a half."""
    for name, most in (("int4 in small groups", 0.3), ("fp8", 0.55)):
        weight, scales = on_grid(GRIDS[name], torch.bfloat16)
        form = stored_form(weight, scales, Room())
        assert isinstance(form, StoredParts)
        held = sum(part.codes.nbytes for part in form.pack(weight))
        assert held <= most * weight.nbytes, name
