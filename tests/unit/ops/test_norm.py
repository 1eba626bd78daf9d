"""Norms: the values and gradients of their formulas, in the type of the weight."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatron.core.ops.norm import layer_norm, rms_norm


def composed_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The formula, left to autograd."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def test_rms_norm_gradients_are_those_of_the_formula() -> None:
    """A wrong hand-written backward would train a model that only looks right."""
    x = torch.randn(3, 2, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, w: rms_norm(a, w, eps=1e-5), (x, weight))
    torch.testing.assert_close(
        rms_norm(x, weight, eps=1e-5), composed_rms_norm(x, weight, 1e-5), rtol=1e-12, atol=1e-12
    )


def test_layer_norm_with_and_without_bias() -> None:
    """Bias is optional, and fp64 stays fp64."""
    x, weight, bias = (torch.randn(*shape, dtype=torch.float64) for shape in ((4, 6), (6,), (6,)))
    normalized = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
    torch.testing.assert_close(
        layer_norm(x, weight, bias, eps=1e-5), normalized * weight + bias, rtol=1e-12, atol=1e-12
    )
    torch.testing.assert_close(layer_norm(x, weight, None, eps=1e-5), normalized * weight, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_computed_in_fp32(name: str, dtype: torch.dtype) -> None:
    """A mean square accumulated in 8 bits would be off by percents; only the stored result may be rounded."""
    x = (torch.randn(2000, 1, 64) * 30).to(dtype).requires_grad_()
    weight = torch.rand(64).to(dtype).requires_grad_()
    bias = torch.zeros(64, dtype=dtype).requires_grad_()
    wide_x, wide_weight, wide_bias = (tensor.detach().double().requires_grad_() for tensor in (x, weight, bias))
    upstream = torch.randn(x.shape).to(dtype)
    results = []
    for a, w, b in ((x, weight, bias), (wide_x, wide_weight, wide_bias)):
        out = layer_norm(a, w, b, eps=1e-5) if name == "layer_norm" else rms_norm(a, w, eps=1e-5) + b
        torch.autograd.backward(out, upstream.to(out.dtype))
        results.append(out)
    ulp = torch.finfo(dtype).eps
    torch.testing.assert_close(results[0].double(), results[1], rtol=ulp, atol=1e-6)
    for narrow, wide in ((x, wide_x), (weight, wide_weight), (bias, wide_bias)):
        assert narrow.grad is not None and wide.grad is not None and narrow.grad.dtype == dtype
        assert (narrow.grad.double() - wide.grad).norm() / wide.grad.norm() < ulp


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_gradients_of_what_is_trained_do_not_depend_on_what_is_frozen(name: str, dtype: torch.dtype) -> None:
    """The first norm behind a frozen embedding needs no gradient of its input, a frozen one none of its weight."""

    def gradients(frozen: int | None) -> list[Tensor | None]:
        generator = torch.Generator().manual_seed(1)
        inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in ((5, 8), (8,), (8,))]
        for number, each in enumerate(inputs):
            each.requires_grad_(number != frozen)
        x, weight, bias = inputs
        out = layer_norm(x, weight, bias, eps=1e-5) if name == "layer_norm" else rms_norm(x, weight, eps=1e-5) + bias
        torch.autograd.backward(out, torch.linspace(-1, 1, out.numel()).view_as(out).to(dtype))
        return [each.grad for each in inputs]

    everything = gradients(None)
    for frozen in range(3):
        wanted = [None if number == frozen else grad for number, grad in enumerate(everything)]
        for mine, theirs in zip(gradients(frozen), wanted, strict=True):
            assert (mine is None and theirs is None) or (
                mine is not None and theirs is not None and torch.equal(mine, theirs)
            )


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_wide_residual_is_normalized_wide_and_returned_narrow(name: str) -> None:
    """With --fp32-residual-connection the stream is fp32 and the layers bf16: the norm is where the type changes."""
    x, weight = torch.randn(3, 16, requires_grad=True), torch.ones(16, dtype=torch.bfloat16, requires_grad=True)
    bias = torch.zeros(16, dtype=torch.bfloat16)
    out = layer_norm(x, weight, bias, eps=1e-5) if name == "layer_norm" else rms_norm(x, weight, eps=1e-5)
    torch.autograd.backward(out.sum())
    assert out.dtype == torch.bfloat16
    assert x.grad is not None and x.grad.dtype == torch.float32
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16
    exact = functional.layer_norm(x, (16,)) if name == "layer_norm" else composed_rms_norm(x, weight.float(), 1e-5)
    torch.testing.assert_close(out, exact.to(torch.bfloat16))


def test_every_kind_of_weight() -> None:
    """Heads with weights of their own, all heads together, no weights: each is its formula, with its gradients."""
    x = torch.randn(3, 2, 4, 6, dtype=torch.float64, requires_grad=True)
    heads, head = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((4, 6), (6,)))
    centred = x - x.mean(-1, keepdim=True)
    own, whole = x.square().mean(-1, keepdim=True), x.square().mean((-2, -1), keepdim=True)
    kinds: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor]] = {
        "rms, of its own": (lambda a, w: rms_norm(a, w, eps=1e-5), x * (own + 1e-5).rsqrt() * heads),
        "rms, all heads": (lambda a, w: rms_norm(a, w, eps=1e-5, dims=2), x * (whole + 1e-5).rsqrt() * heads),
        "rms, none": (lambda a, w: rms_norm(a, None, eps=1e-5) * w, x * (own + 1e-5).rsqrt() * heads),
        "layer, of its own": (
            lambda a, w: layer_norm(a, w, None, eps=1e-5),
            centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * heads,
        ),
        "layer, none": (
            lambda a, w: layer_norm(a, None, None, eps=1e-5) * w,
            centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * heads,
        ),
    }
    for name, (norm, expected) in kinds.items():
        torch.testing.assert_close(norm(x, heads), expected, rtol=1e-12, atol=1e-12, msg=name)
        assert torch.autograd.gradcheck(norm, (x, heads)), name
    assert torch.equal(rms_norm(x, head, eps=1e-5), rms_norm(x, head.expand(4, 6), eps=1e-5))


def test_an_offset_keeps_the_digits_of_a_narrow_weight() -> None:
    """1 + w in bf16 has no digits left for a small w: Gemma's norms were off by 0.3 %."""
    x, weight = torch.randn(64, 32).bfloat16(), (torch.rand(32) / 100).bfloat16()
    expected = composed_rms_norm(x.double(), 1.0 + weight.double(), 1e-6)
    torch.testing.assert_close(rms_norm(x, weight, eps=1e-6, offset=1.0).double(), expected, rtol=2**-8, atol=0)
    wide = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    scale = torch.randn(8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, w: rms_norm(a, w, eps=1e-5, offset=1.0), (wide, scale))
