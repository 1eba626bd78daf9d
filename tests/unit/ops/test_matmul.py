"""Matrix products: every library gives the same, and the choice of library is one of speed alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatron.core.ops import matmul
from megatron.core.ops.matmul import add_times_transposed, left_factor, linear, times_transposed

BIG = (96, 128, 160)  # enough work for oneDNN
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 0.1}


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Random operands, small enough that sums of products are about 1."""
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype).mul_(0.3).requires_grad_() for shape in shapes]


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0.0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("rows", [(3, 32), (96,), (1, 1)])
def test_linear_equals_torch(dtype: torch.dtype, with_bias: bool, rows: tuple[int, ...]) -> None:
    """Forward and every gradient of the layer all models are made of."""
    x, weight, bias = tensors((*rows, 128), (160, 128), (160,), dtype=dtype)
    inputs = [x, weight, bias] if with_bias else [x, weight]
    used_bias = bias if with_bias else None
    actual, expected = linear(x, weight, used_bias), functional.linear(x, weight, used_bias)
    assert_near(actual, expected, dtype)
    upstream = torch.randn_like(expected) * 0.3
    for mine, theirs in zip(
        torch.autograd.grad(actual, inputs, upstream), torch.autograd.grad(expected, inputs, upstream)
    ):
        assert_near(mine, theirs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("a_transposed", [True, False])
@pytest.mark.parametrize("b_transposed", [True, False])
def test_products_of_any_layout(dtype: torch.dtype, a_transposed: bool, b_transposed: bool) -> None:
    """Operands come as transposed views, and a total may be a part of a larger tensor."""
    m, k, n = BIG
    a, b, storage = (x.detach() for x in tensors((m, k), (n, k), (m + 7, n), dtype=dtype))
    a_view = a.t().contiguous().t() if a_transposed else a
    b_view = b.t().contiguous().t() if b_transposed else b
    total, exact = storage[7:], a.double() @ b.double().t()
    before = total.double().clone()
    assert_near(times_transposed(a_view, b_view), exact, dtype)
    add_times_transposed(total, a_view, b_view)
    assert_near(total, before + exact, dtype)


def test_linear_needs_only_the_gradients_asked_for() -> None:
    """A frozen weight costs no matmul."""
    x, weight, bias = tensors((96, 128), (160, 128), (160,), dtype=torch.float32)
    weight.requires_grad_(False)
    torch.autograd.backward(linear(x, weight, bias).sum())
    assert weight.grad is None and x.grad is not None and bias.grad is not None


def test_fp64_and_small_products_stay_with_torch() -> None:
    """oneDNN has no fp64, and tiny products would pay more for the call than for the work."""
    big, small = torch.randn(128, 128), torch.randn(4, 4)
    assert not matmul._onednn_serves(big.double(), big.double())
    assert not matmul._onednn_serves(small, small)
    assert matmul._onednn_serves(big, big) == matmul._has_onednn()


def test_left_factor_copies_only_where_it_pays() -> None:
    """The vocabulary loss prepares its weight once for all chunks; elsewhere a copy would be waste."""
    view = torch.randn(256, 128, dtype=torch.float64).t()
    assert left_factor(view) is view
    assert left_factor(view.float()).is_contiguous() == (matmul._has_onednn() or view.float().is_contiguous())
