"""Activations of the MLP, plain and gated, that keep only their input for the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatron.config.model import Nonlinearity

_QUICK = 1.702  # of x in the sigmoid that approximates GELU (arXiv:1606.08415)
_APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}


def activation(x: Tensor, kind: Nonlinearity) -> Tensor:
    """``kind`` applied to every element: GELU (exact, by tanh or by a sigmoid), SiLU, ReLU, or ReLU squared."""
    if kind == "quick_gelu":
        return x * torch.sigmoid(_QUICK * x)
    if kind == "silu":
        return functional.silu(x)
    if kind == "relu":
        return functional.relu(x)
    if kind == "squared_relu":
        return functional.relu(x).square()
    return functional.gelu(x, approximate=_APPROXIMATE[kind])


def gated_activation(x: Tensor, kind: Nonlinearity, *, limit: float | None = None, offset: float = 0.0) -> Tensor:
    """``act(gate) * (value + offset)`` [..., f] of ``x`` [..., 2f] = (gate half, value half): SwiGLU, GEGLU.

    ``limit``: gates are cut off above it, values beyond it on both sides (gpt-oss, arXiv:2508.10925). Shazeer 2020.
    """
    if not torch.is_grad_enabled():
        return _gated(x, kind, limit, offset)
    return _GatedActivation.apply(x, kind, limit, offset)  # type: ignore[no-untyped-call, no-any-return]


def _activation_gradient(grad: Tensor, x: Tensor, kind: Nonlinearity) -> Tensor:
    if kind == "quick_gelu":
        share = torch.sigmoid(_QUICK * x)
        return (1 + _QUICK * x * (1 - share)).mul_(share).mul_(grad)
    if kind == "silu":
        return torch.ops.aten.silu_backward(grad, x)  # type: ignore[no-any-return]
    if kind == "relu":
        return grad * (x > 0)
    if kind == "squared_relu":
        return functional.relu(x).mul_(grad).mul_(2)
    return torch.ops.aten.gelu_backward(grad, x, approximate=_APPROXIMATE[kind])  # type: ignore[no-any-return]


class _GatedActivation(torch.autograd.Function):
    """Keeps ``x`` only and computes ``act(gate)`` again in the backward pass, where autograd would keep it as well.

    dvalue = dy·act(gate),  dgate = dy·(value + offset)·act'(gate);  zero where the limit cuts off.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: Nonlinearity, limit: float | None, offset: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kind, ctx.limit, ctx.offset = kind, limit, offset
        return _gated(x, kind, limit, offset)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        gate, value = _limited(x, ctx.limit)
        grad_x = torch.empty_like(x)
        grad_gate, grad_value = grad_x.chunk(2, dim=-1)
        torch.mul(grad, activation(gate, ctx.kind), out=grad_value)
        grad_gate.copy_(_activation_gradient(grad * (value + ctx.offset if ctx.offset else value), gate, ctx.kind))
        if ctx.limit is not None:
            whole_gate, whole_value = x.chunk(2, dim=-1)
            grad_gate.masked_fill_(whole_gate > ctx.limit, 0.0)
            grad_value.masked_fill_(whole_value.abs() > ctx.limit, 0.0)
        return grad_x, None, None, None


def _gated(x: Tensor, kind: Nonlinearity, limit: float | None, offset: float) -> Tensor:
    gate, value = _limited(x, limit)
    return activation(gate, kind).mul_(value + offset if offset else value)


def _limited(x: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    gate, value = x.chunk(2, dim=-1)
    return (gate, value) if limit is None else (gate.clamp(max=limit), value.clamp(-limit, limit))
