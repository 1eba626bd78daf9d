"""Activations: formulas, gradients, and what they keep in memory."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron.config.activation import Nonlinearity
from megatron.core.ops.activation import activation, gated_activation, plain_activation

FORMULAS: dict[Nonlinearity, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "silu": lambda x: x * torch.sigmoid(x),
    "relu": lambda x: x.clamp(min=0),
    "squared_relu": lambda x: x.clamp(min=0) ** 2,
}


@pytest.mark.parametrize("kind", FORMULAS)
def test_activation_is_its_formula(kind: Nonlinearity) -> None:
    """A speed or fusion choice must never swap tanh and exact GELU."""
    x = torch.linspace(-4, 4, 101, dtype=torch.float64)
    torch.testing.assert_close(activation(x, kind), FORMULAS[kind](x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", FORMULAS)
def test_plain_activation(kind: Nonlinearity) -> None:
    """The same, with the gradient of its formula, and one tensor kept."""
    x, kept = torch.linspace(-4, 4, 101, dtype=torch.float64, requires_grad=True), list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        found = plain_activation(x, kind)
    assert len({each.data_ptr() for each in kept}) == 1
    torch.testing.assert_close(found, FORMULAS[kind](x), rtol=1e-12, atol=1e-12)
    upstream = torch.randn(101, dtype=torch.float64)
    (actual,), (wanted,) = (torch.autograd.grad(each, x, upstream) for each in (found, FORMULAS[kind](x)))
    expected = wanted * (x.detach() != 0) if kind.endswith("relu") else wanted  # clamp has half a gradient at 0
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", FORMULAS)
def test_gate_is_the_first_half(kind: Nonlinearity) -> None:
    """Checkpoints store (gate, up) in that order; the other order would load without complaint and compute nonsense."""
    x = torch.randn(3, 2, 10, dtype=torch.float64, requires_grad=True)
    gate, value = x.chunk(2, dim=-1)
    torch.testing.assert_close(gated_activation(x, kind), FORMULAS[kind](gate) * value, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda a: gated_activation(a, kind), (x,))


@pytest.mark.parametrize("kind", FORMULAS)
def test_limit_and_offset(kind: Nonlinearity) -> None:
    """As gpt-oss: gates have no lower limit, and values are cut off before the offset is added."""
    torch.manual_seed(0)  # else values are cut off on one side only, once in 150 draws
    x = torch.randn(3, 2, 10, dtype=torch.float64, requires_grad=True)
    gate, value = x.chunk(2, dim=-1)
    expected = FORMULAS[kind](gate.clamp(max=0.7)) * (value.clamp(-0.7, 0.7) + 1.5)
    found = gated_activation(x, kind, limit=0.7, offset=1.5)
    assert ((gate > 0.7).any() and (gate < -0.7).any()) and ((value > 0.7).any() and (value < -0.7).any())
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    (actual,), (wanted,) = (torch.autograd.grad(each.square().sum(), x) for each in (found, expected))
    torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", FORMULAS)
def test_gated_activation_takes_any_gradient_layout(kind: Nonlinearity) -> None:
    """Gradients may arrive expanded or transposed, as from a sum or a permuted consumer."""
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    torch.autograd.backward(gated_activation(x, kind).sum())
    (expected,) = torch.autograd.grad(gated_activation(x, kind), x, torch.ones(3, 4, dtype=torch.float64).t())
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected)


def test_gated_activation_keeps_its_input_only() -> None:
    """Keeping the activated gate as well would cost a third more memory in every MLP."""
    kept: list[int] = []

    def count(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    x = torch.randn(8, 32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        gated_activation(x, "silu")
    assert sum(kept) == x.numel()
