"""Activations of the MLP, plain and gated, that keep only their input for the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from megatron.config.activation import Nonlinearity
from megatron.core.ops.compiled import Compiled

_QUICK = 1.702  # of x in the sigmoid that approximates GELU (arXiv:1606.08415)
_APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}
_OF_SEVERAL_OPERATORS = ("quick_gelu", "squared_relu")


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


def plain_activation(x: Tensor, kind: Nonlinearity) -> Tensor:
    """``activation`` that keeps ``x`` alone for the backward pass and, compiled, is one kernel in each direction."""
    if kind not in _OF_SEVERAL_OPERATORS:
        return activation(x, kind)
    return _PlainActivation.apply(x, kind)  # type: ignore[no-untyped-call, no-any-return]


def gated_activation(x: Tensor, kind: Nonlinearity, *, limit: float | None = None, offset: float = 0.0) -> Tensor:
    """``act(gate) * (value + offset)`` [..., f] of ``x`` [..., 2f] = (gate half, value half): SwiGLU, GEGLU.

    ``limit``: gates are cut off above it, values beyond it on both sides (gpt-oss, arXiv:2508.10925). Shazeer 2020.
    """
    if not torch.is_grad_enabled():
        return _gated(x, kind, limit, offset)
    return _GatedActivation.apply(x, kind, limit, offset)  # type: ignore[no-untyped-call, no-any-return]


def gated_gradients(
    grad: Tensor, x: Tensor, scales: Tensor, kind: Nonlinearity, *, limit: float | None = None, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Gradients of ``x`` [n, 2f] and ``scales`` [n, 1] in ``scales * gated_activation(x)``; overwrites ``grad`` [n, f].

    Fresh memory is what such passes wait for, so each value is computed where a later one will be.
    """
    gate, value = _limited(x, limit)
    grad_x, activated = torch.empty_like(x), activation(gate, kind)
    grad_gate, grad_value = grad_x.chunk(2, dim=-1)
    torch.mul(grad, activated, out=grad_value)
    grad.mul_(value + offset if offset else value)
    grad_scales = activated.mul_(grad).sum(-1, keepdim=True, dtype=scales.dtype)
    _set_activation_gradient(grad_gate, grad, gate, kind)
    _cut_off(grad_x, x, limit)
    return grad_x.mul_(scales), grad_scales


@Compiled
def _plain(x: Tensor, kind: Nonlinearity) -> Tensor:
    return activation(x, kind)


@Compiled
def _plain_gradient(grad: Tensor, x: Tensor, kind: Nonlinearity) -> Tensor:
    return _activation_gradient(grad, x, kind)


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


def _set_activation_gradient(out: Tensor, grad: Tensor, x: Tensor, kind: Nonlinearity) -> None:
    if kind == "silu" and not torch.compiler.is_compiling():
        torch.ops.aten.silu_backward(grad, x, grad_input=out)
    else:
        out.copy_(_activation_gradient(grad, x, kind))


def _cut_off(grad_x: Tensor, x: Tensor, limit: float | None) -> None:
    """Zero where ``limit`` cuts gates or values off."""
    if limit is not None:
        (grad_gate, grad_value), (gate, value) = grad_x.chunk(2, dim=-1), x.chunk(2, dim=-1)
        grad_gate.masked_fill_(gate > limit, 0.0)
        grad_value.masked_fill_(value.abs() > limit, 0.0)


class _PlainActivation(torch.autograd.Function):
    """Keeps ``x`` only, where autograd would keep what the operators of an activation give each other, too."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, kind: Nonlinearity) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kind = kind
        return _plain(x, kind)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return _plain_gradient(grad, x, ctx.kind), None


class _GatedActivation(torch.autograd.Function):
    """Keeps ``x`` only and computes ``act(gate)`` again in the backward pass, where autograd would keep it as well.

    dvalue = dy·act(gate),  dgate = dy·(value + offset)·act'(gate);  zero where the limit cuts off.
    """

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, kind: Nonlinearity, limit: float | None, offset: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kind, ctx.limit, ctx.offset = kind, limit, offset
        return _gated(x, kind, limit, offset)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        return _gated_gradient(grad, x, ctx.kind, ctx.limit, ctx.offset), None, None, None


@Compiled
def _gated_gradient(grad: Tensor, x: Tensor, kind: Nonlinearity, limit: float | None, offset: float) -> Tensor:
    gate, value = _limited(x, limit)
    grad_x = torch.empty_like(x)
    grad_gate, grad_value = grad_x.chunk(2, dim=-1)
    if torch.compiler.is_compiling():  # where fresh memory costs nothing, and results can't go to views
        grad_value.copy_(grad * activation(gate, kind))
    else:
        torch.mul(grad, activation(gate, kind), out=grad_value)
    grad = grad * (value + offset if offset else value)
    _set_activation_gradient(grad_gate, grad, gate, kind)
    _cut_off(grad_x, x, limit)
    return grad_x


@Compiled
def _gated(x: Tensor, kind: Nonlinearity, limit: float | None, offset: float) -> Tensor:
    gate, value = _limited(x, limit)
    return activation(gate, kind).mul_(value + offset if offset else value)


def _limited(x: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    gate, value = x.chunk(2, dim=-1)
    return (gate, value) if limit is None else (gate.clamp(max=limit), value.clamp(-limit, limit))
