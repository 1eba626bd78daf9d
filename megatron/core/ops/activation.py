"""Activations of the MLP, plain and gated, that keep only their input for the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatron.config.model import Nonlinearity

_APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}


def activation(x: Tensor, kind: Nonlinearity) -> Tensor:
    """``kind`` applied to every element: tanh-approximated or exact GELU, SiLU, ReLU, or ReLU squared."""
    if kind == "silu":
        return functional.silu(x)
    if kind == "relu":
        return functional.relu(x)
    if kind == "squared_relu":
        return functional.relu(x).square()
    return functional.gelu(x, approximate=_APPROXIMATE[kind])


def gated_activation(x: Tensor, kind: Nonlinearity) -> Tensor:
    """``act(gate) * value`` [..., f] of ``x`` [..., 2f] = (gate half, value half): SwiGLU, GEGLU. Shazeer 2020."""
    return _GatedActivation.apply(x, kind)  # type: ignore[no-untyped-call, no-any-return]


def _activation_gradient(grad: Tensor, x: Tensor, kind: Nonlinearity) -> Tensor:
    if kind == "silu":
        return torch.ops.aten.silu_backward(grad, x)  # type: ignore[no-any-return]
    if kind == "relu":
        return grad * (x > 0)
    if kind == "squared_relu":
        return functional.relu(x).mul_(grad).mul_(2)
    return torch.ops.aten.gelu_backward(grad, x, approximate=_APPROXIMATE[kind])  # type: ignore[no-any-return]


class _GatedActivation(torch.autograd.Function):
    """Keeps ``x`` only and computes ``act(gate)`` again in the backward pass, where autograd would keep it as well.

    dvalue = dy·act(gate),  dgate = dy·value·act'(gate).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: Nonlinearity) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kind = kind
        gate, value = x.chunk(2, dim=-1)
        return activation(gate, kind).mul_(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        gate, value = x.chunk(2, dim=-1)
        grad_x = torch.empty_like(x)
        grad_gate, grad_value = grad_x.chunk(2, dim=-1)
        torch.mul(grad, activation(gate, ctx.kind), out=grad_value)
        grad_gate.copy_(_activation_gradient(grad * value, gate, ctx.kind))
        return grad_x, None
