"""Normalization over the last dim, or the last two, computed in fp32 or higher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from megatron.core.ops.compiled import Compiled


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float) -> Tensor:
    """``(x - mean) / sqrt(var + eps) * weight + bias`` over the last dim of ``x`` [..., h]. Ba et al. 2016.

    ``weight`` [h]; [n, h] for a weight of its own for each ``x`` [..., n, h], without bias; None for none. A residual
    stream wider than the weights (fp32 residual, bf16 layers) is normalized in its own type; the result has the type
    of ``weight``, as the next matmul requires, or of ``x``.
    """
    width = x.shape[-1:]
    if weight is None:
        return F.layer_norm(x, width, eps=eps)
    if x.dtype != weight.dtype:
        weight_in_x, bias_in_x = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        return F.layer_norm(x, width, weight_in_x, bias_in_x, eps).to(weight.dtype)
    if weight.dim() > 1 and not torch.is_grad_enabled():
        return F.layer_norm(x, width, eps=eps) * weight
    if torch.is_grad_enabled() and (
        weight.dim() > 1 or (x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16))
    ):
        return _LayerNorm.apply(x, weight, bias, eps)  # type: ignore[no-untyped-call, no-any-return]
    return F.layer_norm(x, width, weight, bias, eps)


class _LayerNorm(torch.autograd.Function):
    """Torch's kernels except for sums over rows: on a CPU torch adds bf16 in bf16, an error of 5 % after 2048 rows.

    A weight for each of several heads, [n, h], is multiplied outside the kernel.
    """

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        inside = weight if weight.dim() == 1 else None
        out, mean, scale = torch.native_layer_norm(x, x.shape[-1:], inside, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, scale)
        return out if inside is not None else out * weight

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight, bias, mean, scale = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        inside = weight if weight.dim() == 1 else None
        grad_x, _, _ = torch.ops.aten.native_layer_norm_backward(
            grad if inside is not None else grad * weight,
            *(x, x.shape[-1:], mean, scale, inside, bias, [needs_x, False, False]),
        )
        wide_type = torch.promote_types(x.dtype, torch.float32)
        wide_grad = grad.to(wide_type)
        grad_bias = wide_grad.flatten(0, -2).sum(0).to(weight.dtype) if needs_bias else None
        if not needs_weight:
            return grad_x, None, grad_bias, None
        normalized = x.to(wide_type, copy=True).sub_(mean).mul_(scale)
        return grad_x, _sum_of_rows(normalized.mul_(wide_grad), weight), grad_bias, None


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    *,
    eps: float,
    offset: float = 0.0,
    dims: int = 1,
    average: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """``x / sqrt(mean(x²) + eps) * (weight + offset)`` over the last ``dims`` of ``x``; keeps ``x`` and one number per
    row. ``offset`` is added in fp32 or wider: 1 + 0.01 has too few digits in bf16.

    ``weight``: None for none; of more dims than ``dims`` it holds a weight for each of several heads. The result has
    the type of ``weight``, or of ``x``. ``average``: where ranks hold parts of a row, the mean of their means.
    Zhang and Sennrich 2019.
    """
    if not torch.is_grad_enabled():
        return _body(average)(x, weight, eps, offset, tuple(range(-dims, 0)), average)[0]
    return _RMSNorm.apply(x, weight, eps, offset, dims, average)  # type: ignore[no-untyped-call, no-any-return]


class _RMSNorm(torch.autograd.Function):
    """Torch's own composition keeps three tensors of the size of ``x``; this keeps ``x`` alone.

    With x̂ = x·r, r = 1 / sqrt(mean(x²) + eps), and u = dy·weight:  dx = r·(u - x̂·mean(u·x̂)),  dweight = Σ_rows dy·x̂.
    """

    @staticmethod
    @override
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        eps: float,
        offset: float,
        dims: int,
        average: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        ctx.over, ctx.average, ctx.offset = tuple(range(-dims, 0)), average, offset
        out, scale = _body(average)(x, weight, eps, offset, ctx.over, average)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        (x, weight, scale), trains = ctx.saved_tensors, ctx.needs_input_grad[1]
        gradients = _gradients if ctx.average is None else _gradients.eager
        found = gradients(grad, x, weight, scale, ctx.offset, ctx.over, ctx.average, trains)
        return *found, None, None, None, None


@Compiled
def _gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    scale: Tensor,
    offset: float,
    over: tuple[int, ...],
    average: Callable[[Tensor], Tensor] | None,
    trains: bool,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of ``x`` and, if it ``trains``, of ``weight``."""
    normalized = x * scale
    wide_grad = grad.to(scale.dtype)
    product = wide_grad * normalized
    grad_weight = None
    if weight is not None:
        grad_weight = _sum_of_rows(product, weight) if trains else None
        factor = _shifted(weight, offset, scale.dtype)
        product, wide_grad = product.mul_(factor), wide_grad * factor
    mean = product.mean(over, keepdim=True)
    if average is not None:
        mean = average(mean)
    grad_x = normalized.mul_(-mean).add_(wide_grad).mul_(scale)
    return grad_x.to(x.dtype), grad_weight


@Compiled
def _normalized(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    over: tuple[int, ...],
    average: Callable[[Tensor], Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """``rms_norm``, and what each row was multiplied by."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    elements = x.shape[over[0] :].numel()
    mean = torch.linalg.vector_norm(wide, dim=over, keepdim=True).square_().div_(elements)
    scale = (mean if average is None else average(mean)).add_(eps).rsqrt_()
    if weight is None:
        return (wide * scale).to(x.dtype), scale
    return (wide * scale).mul_(_shifted(weight, offset, wide.dtype)).to(weight.dtype), scale


def _body(
    average: Callable[[Tensor], Tensor] | None,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """``_normalized``, as it is where ranks exchange numbers inside."""
    return _normalized if average is None else _normalized.eager


def _shifted(weight: Tensor, offset: float, wide: torch.dtype) -> Tensor:
    return weight.to(wide) + offset if offset else weight


def _sum_of_rows(product: Tensor, weight: Tensor) -> Tensor:
    """The gradient of ``weight`` from that of each row, in the type of the sum."""
    return product.flatten(0, -1 - weight.dim()).sum(0).to(weight.dtype)
