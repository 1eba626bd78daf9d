"""Causal depthwise convolution against a loop over tokens and taps."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from megatron.core.ops.causal_conv import causal_conv

TAPS = 4


def looped(x: Tensor, weight: Tensor, bias: Tensor | None, initial: Tensor | None, ids: Tensor | None) -> Tensor:
    """Token by token, tap by tap, back to the beginning of the document. ``ids``: of the initial rows as well."""
    before = x.new_zeros(x.shape[0], TAPS - 1, x.shape[2]) if initial is None else initial
    rows, results = torch.cat((before, x), dim=1), []
    for sample, t in itertools.product(range(x.shape[0]), range(x.shape[1])):
        total = torch.zeros_like(x[0, 0]) if bias is None else bias
        for back in range(TAPS):
            place = t + TAPS - 1 - back
            if ids is not None and ids[sample, place] != ids[sample, t + TAPS - 1]:
                break
            total = total + weight[:, 0, TAPS - 1 - back] * rows[sample, place]
        results.append(total)
    return torch.stack(results).view_as(x)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 11])
@pytest.mark.parametrize("documents", ["none", "of tokens", "of all rows"])
@pytest.mark.parametrize("has_initial", [False, True])
def test_convolution_is_the_loop(length: int, documents: str, has_initial: bool) -> None:
    """Texts shorter than the taps, rows before them, and documents that begin anywhere: values and all gradients."""
    generator = torch.Generator().manual_seed(length)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    x, weight, bias = draw(2, length, 5), draw(5, 1, TAPS), draw(5) if length % 2 else None
    initial = draw(2, TAPS - 1, 5) if has_initial else None
    # Numbers come back: a token must not see a document of the same number before the one in between.
    ids = (torch.rand(2, TAPS - 1 + length, generator=generator) < 0.5).cumsum(dim=1) % 2
    of_tokens, of_initial = ids[:, TAPS - 1 :], ids[:, : TAPS - 1]
    if documents == "of tokens":
        ids = torch.cat((of_tokens[:, :1].expand(-1, TAPS - 1), of_tokens), dim=1)
    found = causal_conv(
        x,
        weight,
        bias,
        initial=initial,
        document_ids=None if documents == "none" else of_tokens,
        initial_ids=of_initial if documents == "of all rows" else None,
    )
    wanted = looped(x, weight, bias, initial, None if documents == "none" else ids)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    leaves = [each for each in (x, weight, bias, initial) if each is not None]
    upstream = draw(2, length, 5).detach()
    gradients = (
        torch.autograd.grad(out, leaves, upstream, allow_unused=True, materialize_grads=True) for out in (found, wanted)
    )
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_rows_of_a_wider_tensor() -> None:
    """x, B and C lie beside z and dt in one projection: the convolution reads and writes rows of any stride."""
    wide = torch.randn(2, 9, 12, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 1, TAPS, dtype=torch.float64)
    found = causal_conv(wide[..., 3:8], weight, None)
    (gradient,) = torch.autograd.grad(found.sum(), wide)
    torch.testing.assert_close(found, looped(wide[..., 3:8], weight, None, None, None), rtol=1e-12, atol=1e-12)
    assert gradient[..., :3].abs().sum() == 0 == gradient[..., 8:].abs().sum()


def test_bf16_sums_of_weights_are_in_fp32() -> None:
    """The gradient of a tap is a sum over all tokens; added in bf16 it stops growing after some hundreds."""
    x = torch.rand(1, 4096, 3).bfloat16()
    weight = torch.rand(3, 1, TAPS).bfloat16().requires_grad_()
    bias = torch.zeros(3, dtype=torch.bfloat16, requires_grad=True)
    found = torch.autograd.grad(causal_conv(x, weight, bias).sum(), (weight, bias))
    exact = [each.detach().double().requires_grad_() for each in (weight, bias)]
    wanted = torch.autograd.grad(causal_conv(x.double(), exact[0], exact[1]).sum(), exact)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=4e-3, atol=0.0)
