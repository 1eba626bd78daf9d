"""Matrix products by the fastest library at hand. On CPU in fp32 that is oneDNN: torch's own choice, MKL, takes its
AVX-512 kernels on Intel's processors only, and is half as fast on others.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# Below this many multiplications oneDNN's fixed cost of a call (10 µs) outweighs its speed.
_ONEDNN_FROM = 1 << 20


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x·weightᵀ + bias``: [..., in] -> [..., out] for ``weight`` [out, in]. The forward matmul of every layer."""
    if not _onednn_serves(x, weight):
        return functional.linear(x, weight, bias)
    result: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return result


def times_transposed(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """``a·bᵀ`` (+ ``bias`` on every row) without gradient: [m, k], [n, k] -> [m, n]. Best with ``a`` contiguous."""
    if _onednn_serves(a, b):
        product: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")
        return product
    return torch.mm(a, b.t()) if bias is None else torch.addmm(bias, a, b.t())


def add_times_transposed(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a·bᵀ`` in place: [m, n], [m, k], [n, k]."""
    if _onednn_serves(a, b):
        total.add_(times_transposed(a, b))
    else:
        total.addmm_(a, b.t())


def left_factor(x: Tensor) -> Tensor:
    """``x`` ready to be the first factor of several products: contiguous where each of them would otherwise copy it."""
    return x.contiguous() if _onednn_serves(x, x) else x


def _onednn_serves(a: Tensor, b: Tensor) -> bool:
    """Whether oneDNN computes ``a·bᵀ``: fp32 on an x86 CPU, and enough work."""
    return (
        a.device.type == "cpu"
        and a.dtype == torch.float32
        and b.dtype == torch.float32
        and a.numel() * b.shape[0] >= _ONEDNN_FROM
        and _has_onednn()
    )


@functools.cache
def _has_onednn() -> bool:
    built = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    return built and torch.backends.cpu.get_cpu_capability() == "AVX512"


class _Linear(torch.autograd.Function):
    """y = x·Wᵀ + b;  dx = dy·W,  dW = dyᵀ·x,  db = Σ dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return times_transposed(x.flatten(0, -2), weight, bias).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows, grad_rows = x.flatten(0, -2), grad.flatten(0, -2)
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = times_transposed(grad_rows, weight.t()).view_as(x)
        if ctx.needs_input_grad[1]:
            grad_weight = times_transposed(grad_rows.t(), rows.t())
        if ctx.has_bias and ctx.needs_input_grad[2]:
            grad_bias = grad_rows.sum(0)
        return grad_x, grad_weight, grad_bias
