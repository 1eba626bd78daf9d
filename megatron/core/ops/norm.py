"""Normalization over the last dim, computed in fp32 or higher and stored in the type of the weight."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """``(x - mean) / sqrt(var + eps) * weight + bias`` over the last dim of ``x`` [..., h].

    A residual stream wider than the weights (fp32 residual, bf16 layers) is normalized in its own type; the result has
    the type of ``weight``, as the next matmul requires. Ba et al. 2016.
    """
    if x.dtype != weight.dtype:
        weight_in_x, bias_in_x = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        return F.layer_norm(x, weight.shape, weight_in_x, bias_in_x, eps).to(weight.dtype)
    if x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16):
        return _NarrowLayerNorm.apply(x, weight, bias, eps)  # type: ignore[no-untyped-call, no-any-return]
    return F.layer_norm(x, weight.shape, weight, bias, eps)


class _NarrowLayerNorm(torch.autograd.Function):
    """Torch's kernels except for sums over rows: on a CPU torch adds bf16 in bf16, an error of 5 % after 2048 rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        out, mean, scale = torch.native_layer_norm(x, weight.shape, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, scale)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight, bias, mean, scale = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_x, _, _ = torch.ops.aten.native_layer_norm_backward(
            grad, x, weight.shape, mean, scale, weight, bias, [needs_x, False, False]
        )
        wide_grad = grad.float()
        grad_bias = wide_grad.flatten(0, -2).sum(0).to(weight.dtype) if needs_bias else None
        if not needs_weight:
            return grad_x, None, grad_bias, None
        normalized = x.float().sub_(mean).mul_(scale)
        return grad_x, normalized.mul_(wide_grad).flatten(0, -2).sum(0).to(weight.dtype), grad_bias, None


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """``x / sqrt(mean(x²) + eps) * weight`` over the last dim of ``x`` [..., h]; keeps ``x`` and one number per row.

    The result has the type of ``weight``. Zhang and Sennrich 2019.
    """
    return _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call, no-any-return]


class _RMSNorm(torch.autograd.Function):
    """Torch's own composition keeps three tensors of the size of ``x``; this keeps ``x`` alone.

    With x̂ = x·r, r = 1 / sqrt(mean(x²) + eps), and u = dy·weight:  dx = r·(u - x̂·mean(u·x̂)),  dweight = Σ_rows dy·x̂.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        normalized: Tensor = (wide * scale).mul_(weight)
        return normalized.to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        normalized = x * scale
        wide_grad = grad.to(scale.dtype)
        product = wide_grad * normalized
        grad_weight = product.flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        mean = product.mul_(weight).mean(-1, keepdim=True)
        grad_x = (wide_grad * weight).sub_(normalized.mul_(mean)).mul_(scale)
        return grad_x.to(x.dtype), grad_weight, None
