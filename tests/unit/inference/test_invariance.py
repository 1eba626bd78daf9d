"""A row of a product must have the same bits in any number of rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.inference.invariance import EqualRows, cancelling
from megatron.core.inference.products import GenerationProducts
from megatron.core.ops.matmul import linear
from megatron.core.parallel.products import Products

ROWS = (1, 3, 5, 33, 47, 130, 513)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_own", [False, True])
def test_rows_have_the_same_bits_in_any_number(dtype: torch.dtype, has_bias: bool, is_own: bool) -> None:
    """A measurement with random numbers accepted numbers of rows that differ: rounding to bf16 hid most of it. Here
    products are nothing but what rounding leaves.
    """
    for outputs, inputs in ((1024, 512), (96, 1376), (40, 31)):
        multiply = GenerationProducts(is_batch_invariant=True)
        few, weight = cancelling(torch.empty(outputs, inputs, dtype=dtype))
        weight = nn.Parameter(weight, requires_grad=False) if is_own else weight
        bias = torch.zeros(outputs, dtype=dtype) if has_bias else None
        expected = torch.cat([multiply(row[None], weight, bias) for row in few])
        for rows in ROWS:
            found = multiply(few.repeat(-(-rows // 4), 1)[:rows], weight, bias)
            assert torch.equal(found, expected.repeat(-(-rows // 4), 1)[:rows]), (outputs, inputs, rows)


def test_products_are_those_of_linear_layers() -> None:
    """With bias, in three dimensions, by head and without rows."""
    products, generator = Products(), torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    x, weight, bias = random(7, 2, 30), random(50, 30), random(50)
    by_head = (random(5, 1, 3, 8), random(3, 8, 6))
    expected = products.by_head(*by_head)
    with products.by(GenerationProducts(is_batch_invariant=True)):
        torch.testing.assert_close(linear(x, weight, bias, by=products.multiply), F.linear(x, weight, bias))
        torch.testing.assert_close(products.by_head(*by_head), expected)
        assert linear(x[:0], weight, None, by=products.multiply).shape == (0, 2, 50)
    assert products.multiply is None


def test_rows_are_cut_with_little_padding() -> None:
    rule = EqualRows(F.linear, (4, 8, 32))
    assert [rule.passes(rows) for rows in (0, 3, 9, 17, 70)] == [[], [3], [8, 1], [17], [32, 32, 6]]
    assert [rule.padded(rows) for rows in (1, 8, 9)] == [4, 8, 32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_in_training_may_change(dtype: torch.dtype) -> None:
    """Samples during training came from the weights of the first ones, had their copies been kept."""
    weight, x = nn.Parameter(torch.ones(64, 32, dtype=dtype)), torch.ones(9, 32, dtype=dtype)
    for is_batch_invariant in (False, True):
        multiply = GenerationProducts(is_batch_invariant=is_batch_invariant)
        for value in (1.0, 2.0):
            with torch.no_grad():
                weight.fill_(value)
                assert multiply(x, weight, None).flatten().tolist() == [32 * value] * (9 * 64)
